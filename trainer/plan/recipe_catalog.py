"""The built-in recipes as data: names, parameters, defaults and what they mean. Pure, without torch.

The API checks `run.recipe` and `run.args` with it at submission, and the builders (`trainer.recipes`) get their
arguments filled in by it; so neither knows a parameter that the other does not. Not for: building.
"""

from __future__ import annotations

import copy
import difflib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from trainer.plan.problem import PlanError, PlanProblem

Kind = Literal["text", "integer", "number", "boolean", "integers"]

_LONGEST_COMPARED: Final = 60
_KIND_NAMES: Final[dict[Kind, str]] = {
    "text": "a string",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "integers": "a list of whole numbers",
}


@dataclass(frozen=True)
class Parameter:
    """One key of `run.args`."""

    name: str
    kind: Kind
    default: Any
    """None: null is a value, too."""
    meaning: str
    choices: tuple[Any, ...] = field(default=(), kw_only=True)
    """The only values; empty: any of the kind."""
    names: tuple[str, ...] = field(default=(), kw_only=True)
    """Of data: what is built in. Anything else is a path, and is written with a slash or a dot."""
    least: float = field(default=-math.inf, kw_only=True)
    most: float = field(default=math.inf, kw_only=True)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What can be trained without code."""

    meaning: str
    parameters: tuple[Parameter, ...]
    rule: Callable[[Mapping[str, Any]], Iterator[tuple[str, str, str]]]
    """What does not go together, as (parameter, message, fix), in arguments that are complete and each right."""


@dataclass(frozen=True, kw_only=True)
class TransformerShape:
    """What a size of the transformer stands for."""

    num_layers: int
    width: int
    num_heads: int
    tokens_per_sample: int


TRANSFORMER_SIZES: Final = {
    "tiny": TransformerShape(num_layers=4, width=64, num_heads=4, tokens_per_sample=64),
    "small": TransformerShape(num_layers=6, width=384, num_heads=6, tokens_per_sample=256),
    "125m": TransformerShape(num_layers=12, width=768, num_heads=12, tokens_per_sample=1024),
    "350m": TransformerShape(num_layers=24, width=1024, num_heads=16, tokens_per_sample=1024),
    "1b": TransformerShape(num_layers=18, width=2048, num_heads=16, tokens_per_sample=2048),
}
"""The names count parameters with tied embeddings of 50,257 tokens; with bytes as tokens it is less."""

BYTE_VOCABULARY: Final = 256
TOKEN_FILE_SUFFIXES: Final = (".bin", ".npy")
TABLE_NAMES: Final = ("digits", "breast_cancer", "wine", "iris", "diabetes", "synthetic")
IMAGE_SIZES: Final = {"digits": 8, "synthetic": 32}
"""Side of the built-in images, in pixels."""
FOLDER_IMAGE_SIZE: Final = 224
SMALL_STEM_UP_TO: Final = 64
"""Images of at most so many pixels get the small stem unless told otherwise."""


def shape_of(args: Mapping[str, Any]) -> TransformerShape:
    """The transformer's shape: that of its size, with what the arguments say instead."""
    size = TRANSFORMER_SIZES[args["size"]]
    return TransformerShape(
        num_layers=args["num_layers"] or size.num_layers,
        width=args["width"] or size.width,
        num_heads=args["num_heads"] or size.num_heads,
        tokens_per_sample=args["tokens_per_sample"] or size.tokens_per_sample,
    )


def image_size_of(args: Mapping[str, Any]) -> int:
    """Side of the images that the resnet sees, in pixels."""
    return int(args["image_size"] or IMAGE_SIZES.get(args["data"], FOLDER_IMAGE_SIZE))


def stem_of(args: Mapping[str, Any]) -> str:
    """The resnet's stem: `small` or `large`."""
    return args["stem"] or ("small" if image_size_of(args) <= SMALL_STEM_UP_TO else "large")


def is_token_file(data: str | None) -> bool:
    """Whether `data` names a file of tokens rather than of text."""
    return data is not None and data.endswith(TOKEN_FILE_SUFFIXES)


# --- What does not go together ---------------------------------------------------------------------------------------


def _transformer_rule(args: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    shape = shape_of(args)
    if shape.width % shape.num_heads:
        message = f"is {shape.num_heads}, which does not divide the width {shape.width}."
        yield "num_heads", message, "Choose num_heads and width so that it does."
    elif args["positions"] == "rotary" and (shape.width // shape.num_heads) % 2:
        message = f"makes heads of {shape.width // shape.num_heads} numbers; rotary positions turn pairs of them."
        yield "num_heads", message, "Use an even number per head, or positions: learned."
    if is_token_file(args["data"]) and args["vocab_size"] is None:
        yield "vocab_size", "is missing: a token file does not say how many tokens there are.", "Add it."
    if args["eval_data"] is not None and args["data"] in (None, "synthetic"):
        yield "eval_data", "needs data of the same kind.", "Give the path of the training data as data, too."


def _mlp_rule(args: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    is_built_in = args["data"] in TABLE_NAMES
    for name in ("task", "target"):
        if is_built_in and args[name] is not None:
            yield name, f"is for table files; what {args['data']} is for is known.", "Leave it out."
    if not is_built_in and args["task"] is None:
        yield "task", "is missing: a table file does not say it.", "Write classification or regression."


def _resnet_rule(args: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    if args["eval_data"] is not None and args["data"] in IMAGE_SIZES:
        yield "eval_data", f"is a folder of images, but data is {args['data']}.", "Leave it out."
    if stem_of(args) == "large" and image_size_of(args) < 32:
        message = f"large divides the size by 32, and the images have {image_size_of(args)} pixels."
        yield "stem", message, "Use stem: small, or a larger image_size."


# --- The recipes -----------------------------------------------------------------------------------------------------

_DTYPE: Final = Parameter(
    "dtype",
    "text",
    "float32",
    "Type of the parameters; float64 is for comparing runs.",
    choices=("float32", "float64"),
)
_DROPOUT: Final = Parameter(
    "dropout", "number", 0.0, "Part of the activations that is dropped in training.", least=0.0, most=0.9
)
_SPLIT_SEED: Final = Parameter("split_seed", "integer", 0, "Chooses which samples are held out.", least=0)


def _eval_fraction(default: float) -> Parameter:
    meaning = "Part of the data that is held out for evaluation."
    return Parameter("eval_fraction", "number", default, meaning, least=0.001, most=0.9)


_TRANSFORMER: Final = (
    Parameter(
        "data",
        "text",
        None,
        "Path of a text file (its bytes are the tokens) or of a token file (.bin, .npy), or synthetic; "
        "null: the help topics that come with Python, 0.5 MB of English.",
        names=("synthetic",),
    ),
    Parameter(
        "eval_data", "text", None, "Path of a held-out file of the same kind; null: the end of data is held out."
    ),
    _eval_fraction(0.1),
    Parameter("token_dtype", "text", "uint16", "Type of the numbers in a .bin file.", choices=("uint16", "uint32")),
    Parameter("vocab_size", "integer", None, "Number of different tokens; null: 256, for bytes.", least=2),
    Parameter(
        "size",
        "text",
        "tiny",
        "Layers, width, heads and tokens per sample in one word.",
        choices=tuple(TRANSFORMER_SIZES),
    ),
    Parameter("num_layers", "integer", None, "Layers; null: as the size says.", least=1),
    Parameter("width", "integer", None, "Numbers per token between layers; null: as the size says.", least=1),
    Parameter("num_heads", "integer", None, "Attention heads; null: as the size says.", least=1),
    Parameter(
        "tokens_per_sample", "integer", None, "Tokens that the model sees at once; null: as the size says.", least=1
    ),
    Parameter(
        "positions", "text", "rotary", "How the model knows where a token stands.", choices=("rotary", "learned")
    ),
    Parameter("mlp", "text", "swiglu", "Activation of the layers' second half.", choices=("swiglu", "gelu")),
    Parameter("tied_embeddings", "boolean", False, "Whether input and output share one embedding."),
    _DROPOUT,
    _DTYPE,
)

_MLP: Final = (
    Parameter(
        "data",
        "text",
        "digits",
        f"One of {', '.join(TABLE_NAMES)}, or path of a .csv file with a header and numeric columns.",
        names=TABLE_NAMES,
    ),
    Parameter("target", "text", None, "Column of a .csv file that is predicted; null: the last."),
    Parameter("task", "text", None, "What a .csv file is for.", choices=("classification", "regression")),
    _eval_fraction(0.2),
    _SPLIT_SEED,
    Parameter("hidden", "integers", [128, 128], "Width of each hidden layer; [] makes a linear model.", least=1),
    Parameter("activation", "text", "relu", "Between the layers.", choices=("relu", "gelu", "tanh")),
    _DROPOUT,
    _DTYPE,
)

_RESNET: Final = (
    Parameter(
        "data",
        "text",
        "digits",
        "digits, synthetic, or path of a folder with a folder of images per class.",
        names=tuple(IMAGE_SIZES),
    ),
    Parameter(
        "eval_data",
        "text",
        None,
        "Path of a folder of held-out images with the same classes; null: a part of data is held out.",
    ),
    _eval_fraction(0.2),
    _SPLIT_SEED,
    Parameter("depth", "integer", 18, "Which ResNet, by its layers.", choices=(18, 34, 50)),
    Parameter("width", "integer", 64, "Channels of the first stage; each further stage has twice as many.", least=1),
    Parameter(
        "norm",
        "text",
        "batch",
        "batch: BatchNorm, over the samples of a batch; group: GroupNorm, within each sample.",
        choices=("batch", "group"),
    ),
    Parameter(
        "stem",
        "text",
        None,
        "First layer. small: 3×3, keeps the size; large: 7×7 and pooling, a quarter of it; "
        f"null: small for images of up to {SMALL_STEM_UP_TO} pixels.",
        choices=("small", "large"),
    ),
    Parameter(
        "image_size",
        "integer",
        None,
        f"Side in pixels to which images are brought; null: {FOLDER_IMAGE_SIZE} for a folder, else as they are.",
        least=4,
    ),
    Parameter("random_flip", "boolean", False, "Mirror training images left to right, at random."),
    _DROPOUT,
    _DTYPE,
)

RECIPES: Final[dict[str, Recipe]] = {
    "transformer": Recipe(
        meaning="A decoder language model, on bytes of text or on tokens.",
        parameters=_TRANSFORMER,
        rule=_transformer_rule,
    ),
    "mlp": Recipe(
        meaning="A multi-layer perceptron on a table: classification or regression.",
        parameters=_MLP,
        rule=_mlp_rule,
    ),
    "resnet": Recipe(
        meaning="A residual network on images: classification.",
        parameters=_RESNET,
        rule=_resnet_rule,
    ),
}
"""Name to recipe."""


# --- Checking --------------------------------------------------------------------------------------------------------


def check_recipe(name: str, args: Mapping[str, Any]) -> list[PlanProblem]:
    """All that keeps the recipe from being built with `args`, as far as that can be known without its data."""
    recipe = RECIPES.get(name)
    if recipe is None:
        return [
            PlanProblem(key="run.recipe", message=f"names no recipe: {name!r:.60}.", fix=_near(name, tuple(RECIPES)))
        ]
    parameters = {one.name: one for one in recipe.parameters}
    found = [
        PlanProblem(key=f"run.args.{key}", message=f"is no parameter of {name}.", fix=_near(key, tuple(parameters)))
        for key in args
        if key not in parameters
    ]
    for parameter in recipe.parameters:
        if parameter.name in args and (wrong := _wrong_value(parameter, args[parameter.name])):
            found.append(PlanProblem(key=f"run.args.{parameter.name}", message=wrong[0], fix=wrong[1]))
    if not found:
        for key, message, fix in recipe.rule(_filled(recipe, args)):
            found.append(PlanProblem(key=f"run.args.{key}", message=message, fix=fix))
    return found


def complete_args(name: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """Every parameter of the recipe with its value: what `args` says, else the default. Raises PlanError."""
    if problems := check_recipe(name, args):
        raise PlanError(problems)
    return _filled(RECIPES[name], args)


def _filled(recipe: Recipe, args: Mapping[str, Any]) -> dict[str, Any]:
    return {one.name: copy.deepcopy(args.get(one.name, one.default)) for one in recipe.parameters}


def _wrong_value(parameter: Parameter, value: Any) -> tuple[str, str] | None:
    """(message, fix), or None for a value that is right."""
    if value is None and parameter.default is None:
        return None
    if not _is_kind(parameter.kind, value):
        return f"must be {_KIND_NAMES[parameter.kind]}, not {value!r:.60}.", f"It means: {parameter.meaning}"
    if parameter.choices and value not in parameter.choices:
        return f"cannot be {value!r:.60}.", _near(str(value), tuple(map(str, parameter.choices)))
    if parameter.names and value not in parameter.names and not any(sign in value for sign in "./"):
        fix = f"{_near(value, parameter.names)} A path is written with a slash or a dot: ./{value:.60}"
        return f"is {value!r:.60}, which is neither built in nor a path.", fix
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, int | float) and not parameter.least <= number <= parameter.most:
            return f"is {number!s:.60}.", _range(parameter)
    return None


def _is_kind(kind: Kind, value: Any) -> bool:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    match kind:
        case "text":
            return isinstance(value, str) and value != ""
        case "integer":
            return is_integer
        case "number":
            return is_integer or (isinstance(value, float) and math.isfinite(value))
        case "boolean":
            return isinstance(value, bool)
        case "integers":
            return isinstance(value, list) and all(_is_kind("integer", one) for one in value)


def _range(parameter: Parameter) -> str:
    if parameter.most == math.inf:
        return f"Use {parameter.least} or more."
    return f"Use a number from {parameter.least} to {parameter.most}."


def _near(word: str, names: tuple[str, ...]) -> str:
    if near := difflib.get_close_matches(word[:_LONGEST_COMPARED], names, n=1):
        return f"Did you mean {near[0]}?"
    return f"Choose one of: {', '.join(names)}."
