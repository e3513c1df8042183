"""Models by name, as profiles, for the tests of `auto`: no torch, so billions of parameters cost nothing."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, Final

from trainer.plan.model_profile import LayerProfile, ModelProfile
from trainer.plan.recipe_profiles import recipe_profile


def _language_model(layers: int, width: int, heads: int, tokens: int = 2048, vocabulary: int = 32_000) -> ModelProfile:
    return _recipe(
        "transformer",
        num_layers=layers,
        width=width,
        num_heads=heads,
        tokens_per_sample=tokens,
        vocab_size=vocabulary,
        data="synthetic",
    )


def _recipe(name: str, **args: Any) -> ModelProfile:
    profile = recipe_profile(name, args)
    assert profile is not None
    return profile


def _without_tensor_plan(profile: ModelProfile) -> ModelProfile:
    layers = tuple(
        replace(layer, parameters=tuple(replace(one, split_dim=None) for one in layer.parameters))
        for layer in profile.layers
    )
    return replace(profile, layers=layers, has_tensor_parallel_plan=False, tensor_parallel_sizes=())


def _as_one_layer(profile: ModelProfile) -> ModelProfile:
    """A user's module that lists no layers: all of it together is one."""

    def together(precision: str) -> Any:
        kept = [layer.activations(precision) for layer in profile.layers]
        saved, fixed = sum(one.saved for one in kept), sum(one.saved_fixed for one in kept)
        return replace(kept[0], saved=saved, saved_fixed=fixed, saved_split=0, output=kept[-1].output)

    plain = _without_tensor_plan(profile)
    layer = LayerProfile(
        name="model",
        parameters=tuple(one for layer in plain.layers for one in layer.parameters),
        buffer_bytes=0,
        fp32=together("fp32"),
        bf16=together("bf16"),
        flops_per_sample=profile.flops_per_sample,
    )
    return replace(plain, layers=(layer,), can_split=False)


_MODELS: Final = {
    "0.1B": lambda: _language_model(12, 768, 12, tokens=1024, vocabulary=50_257),
    "1B": lambda: _language_model(18, 2048, 16),
    "3B": lambda: _language_model(26, 3072, 24),
    "7B": lambda: _language_model(32, 4096, 32),
    "13B": lambda: _language_model(40, 5120, 40),
    "70B": lambda: _language_model(80, 8192, 64),
    "1B, 32k tokens": lambda: _language_model(18, 2048, 16, tokens=32_768),
    "7B without a tensor plan": lambda: _without_tensor_plan(_language_model(32, 4096, 32)),
    "70B without a tensor plan": lambda: _without_tensor_plan(_language_model(80, 8192, 64)),
    "3B that lists no layers": lambda: _as_one_layer(_language_model(26, 3072, 24)),
    "1M words": lambda: _language_model(16, 4096, 32, tokens=512, vocabulary=1_000_000),
    "layers of 13B": lambda: _language_model(4, 32_768, 256, tokens=512),
    "resnet": lambda: _recipe("resnet", depth=50, data="synthetic", image_size=224),
    "mlp": lambda: _recipe("mlp"),
}


@cache
def model(name: str) -> ModelProfile:
    """The profile of a model by its name here."""
    return _MODELS[name]()
