"""Turns the model's errors into sentences for the person who wrote the file, with "did you mean". Pure.

Not for: finding the errors (`job_spec`, `spec_rules`) or their lines (`parse_spec`).
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, Final

from pydantic import BaseModel

from service.schemas.job_spec import JobWire
from service.schemas.located import Path, pointer_of
from service.schemas.spec_rules import Finding
from service.schemas.wire_types import OrMapping

_OTHER_NAMES: Final = {
    "num_gpu": "resources.gpus",
    "num_gpus": "resources.gpus",
    "ngpus": "resources.gpus",
    "gpu_count": "resources.gpus",
    "gpu_type": "resources.gpu",
    "gpu_model": "resources.gpu",
    "accelerator": "resources.gpu",
    "accelerators": "resources.gpus",
    "num_nodes": "resources.nodes",
    "nnodes": "resources.nodes",
    "node_count": "resources.nodes",
    "nproc_per_node": "processes_per_node",
    "ntasks_per_node": "processes_per_node",
    "gpu_mem": "resources.gpu_memory",
    "vram": "resources.gpu_memory",
    "min_gpu_memory": "resources.gpu_memory",
    "node_labels": "resources.labels",
    "node_selector": "resources.labels",
    "constraint": "resources.labels",
    "constraints": "resources.labels",
    "features": "resources.labels",
    "dependency": "after",
    "dependencies": "after",
    "depends_on": "after",
    "needs": "after",
    "begin": "start_after",
    "not_before": "start_after",
    "start_time": "start_after",
    "timezone": "zone",
    "time_zone": "zone",
    "held": "hold",
    "cpu": "resources.cpus",
    "num_cpus": "resources.cpus",
    "cpus_per_node": "resources.cpus",
    "mem": "resources.memory",
    "ram": "resources.memory",
    "timeout": "resources.time",
    "time_limit": "resources.time",
    "walltime": "resources.time",
    "duration": "resources.time",
    "cmd": "run.command",
    "entrypoint": "run.command",
    "arguments": "run.args",
    "file": "run.script",
    "workdir": "code.path",
    "working_dir": "code.path",
    "folder": "code.path",
    "environment": "env",
    "envs": "env",
    "env_vars": "env",
    "labels": "tags",
    "learning_rate": "train.lr",
    "max_steps": "train.steps",
    "num_steps": "train.steps",
    "total_steps": "train.steps",
    "iterations": "train.steps",
    "max_epochs": "train.epochs",
    "num_epochs": "train.epochs",
    "num_train_epochs": "train.epochs",
    "global_batch_size": "train.batch_size",
    "train_batch_size": "train.batch_size",
    "per_device_train_batch_size": "train.batch_size",
    "optim": "train.optimizer",
    "lr_scheduler": "train.schedule",
    "lr_scheduler_type": "train.schedule",
    "scheduler": "train.schedule",
    "warmup": "train.warmup_steps",
    "num_warmup_steps": "train.warmup_steps",
    "max_grad_norm": "train.clip_norm",
    "grad_clip": "train.clip_norm",
    "gradient_clip_val": "train.clip_norm",
    "gradient_clipping": "train.clip_norm",
    "eval_steps": "train.eval_every",
    "eval_interval": "train.eval_every",
    "logging_steps": "train.report_every",
    "log_every": "train.report_every",
    "num_workers": "train.data_workers",
    "dataloader_num_workers": "train.data_workers",
    "random_seed": "train.seed",
    "gradient_accumulation_steps": "parallel.grad_accum_steps",
    "accumulate_grad_batches": "parallel.grad_accum_steps",
    "grad_accum": "parallel.grad_accum_steps",
    "num_microbatches": "parallel.micro_batches",
    "num_micro_batches": "parallel.micro_batches",
    "pipeline_parallel_size": "parallel.pp",
    "pipeline_schedule": "parallel.schedule",
    "tensor_parallel_size": "parallel.tp",
    "gradient_checkpointing": "parallel.activation_checkpointing",
    "mixed_precision": "parallel.precision",
    "dtype": "parallel.precision",
    "torch_compile": "parallel.compile",
    "distributed_strategy": "parallel.strategy",
    "sync_batchnorm": "parallel.sync_batch_norm",
    "save_steps": "checkpoint.every_steps",
    "save_interval": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep",
    "save_top_k": "checkpoint.keep",
    "params": "run.args",
    "parameters": "run.args",
    "kwargs": "run.args",
    "retries": "retry.max",
    "max_retries": "retry.max",
    "grace": "stop_grace",
    "grace_period": "stop_grace",
    "title": "name",
    "job_name": "name",
    "owner": "team",
    "interpreter": "python",
}
"""Keys of other systems, and what they are called here."""
_LONGEST_COMPARED: Final = 40


@cache
def _keys_by_part() -> dict[str, tuple[str, ...]]:
    """The keys of each part of the schema, by pointer; the top is the empty pointer."""
    parts: dict[str, tuple[str, ...]] = {}

    def visit(model: type[BaseModel], pointer: str) -> None:
        parts[pointer] = tuple(info.alias or name for name, info in model.model_fields.items())
        for name, info in model.model_fields.items():
            for part in _models_in((info.annotation, *info.metadata)):
                visit(part, f"{pointer}.{name}" if pointer else name)

    visit(JobWire, "")
    return parts


def _models_in(annotations: tuple[Any, ...]) -> Iterator[type[BaseModel]]:
    for annotation in annotations:
        if isinstance(annotation, OrMapping):
            yield annotation.model
        elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield annotation
        else:
            yield from _models_in(typing.get_args(annotation))


@cache
def _pointers_by_key() -> dict[str, str]:
    """Every key of the schema, at its shallowest place."""
    found: dict[str, str] = {}
    for part, keys in _keys_by_part().items():
        for key in keys:
            found.setdefault(key, f"{part}.{key}" if part else key)
    return found


def suggest_key(path: Path) -> str:
    """ "Did you mean …?" for an unknown key, or what is allowed there."""
    key = str(path[-1]).strip().casefold().replace("-", "_")[:_LONGEST_COMPARED]
    part = pointer_of(path[:-1])
    prefix = f"{part}." if part else ""
    valid = _keys_by_part().get(part, ())
    everywhere = _pointers_by_key()
    if key in ("true", "yes") and "on" in valid:
        return f"Did you mean {prefix}on? (Some YAML readers turn the bare word on into true; send the file as it is.)"
    for pointer in (_OTHER_NAMES.get(key), f"{prefix}{key}" if key in valid else None, everywhere.get(key)):
        if pointer is not None:
            return f"Did you mean {pointer}?"
    if near := difflib.get_close_matches(key, valid, n=1):
        return f"Did you mean {prefix}{near[0]}?"
    names = [*everywhere, *_OTHER_NAMES]
    if near := difflib.get_close_matches(key, names, n=1, cutoff=0.75):
        return f"Did you mean {everywhere.get(near[0]) or _OTHER_NAMES[near[0]]}?"
    return f"Keys here: {', '.join(valid)}." if valid else ""


def shown(value: Any) -> str:
    """A value as it is named in a message: short, in the words of YAML and JSON."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value[:40]}…"' if len(value) > 40 else f'"{value}"'
    if isinstance(value, int) and abs(value) >= 10**20:
        return "a number of more than 20 digits"
    if isinstance(value, Mapping):
        return "a mapping"
    return "a list" if isinstance(value, list) else str(value)


def finding_of(error: Mapping[str, Any], written: str | None) -> Finding:
    """One of pydantic's errors. `written`: the scalar as it stands in the file, when that is known."""
    path: Path = tuple(error["loc"])
    if error["type"] == "extra_forbidden":
        return Finding(path, "unknown key.", suggest_key(path))
    make = _MESSAGES.get(error["type"], _other)
    message, suggestion = make(error["input"], error.get("ctx", {}), written)
    return Finding(path, message, suggestion)


Message = tuple[str, str]


def _missing(value: Any, context: Mapping[str, Any], written: str | None) -> Message:
    return "is missing.", "Add it."


def _string(value: Any, context: Mapping[str, Any], written: str | None) -> Message:
    if isinstance(value, bool | int | float):
        # YAML and JSON read it as something else; what the program would get is then a guess.
        text = written if written is not None else shown(value)
        kind = "true or false" if isinstance(value, bool) else "a number"
        return f"must be a string; {text[:40]} without quotes is {kind}.", f'Write "{text[:40]}" in quotes.'
    return f"must be a string, not {shown(value)}.", 'Write "" for an empty one.' if value is None else ""


def _whole_number(value: Any, context: Mapping[str, Any], written: str | None) -> Message:
    hint = f"Write {value} without quotes." if isinstance(value, str) and value.isdecimal() and len(value) < 20 else ""
    return f"must be a whole number, not {shown(value)}.", hint


def _number(value: Any, context: Mapping[str, Any], written: str | None) -> Message:
    return f"must be a number, not {shown(value)}.", ""


def _truth(value: Any, context: Mapping[str, Any], written: str | None) -> Message:
    return f"must be true or false, not {shown(value)}.", "Write true or false without quotes."


def _list(value: Any, context: Mapping[str, Any], written: str | None) -> Message:
    return f"must be a list, not {shown(value)}.", "Put it in brackets: [ … ]."


def _mapping(value: Any, context: Mapping[str, Any], written: str | None) -> Message:
    return f"must be a mapping of keys to values, not {shown(value)}.", "Write it as {key: value}."


def _choice(value: Any, context: Mapping[str, Any], written: str | None) -> Message:
    expected = str(context.get("expected", ""))
    choices = [part.strip("' ") for part in expected.replace(" or ", ", ").split(", ")]
    near = difflib.get_close_matches(str(value)[:_LONGEST_COMPARED], choices, n=1)
    hint = f"Did you mean {near[0]}?" if near and near[0] != value else f"Choose one of: {', '.join(choices)}."
    return f"cannot be {shown(value)}.", hint


def _at_least(value: Any, context: Mapping[str, Any], written: str | None) -> Message:
    return f"must be at least {context['ge']}, not {shown(value)}.", ""


def _more_than(value: Any, context: Mapping[str, Any], written: str | None) -> Message:
    return f"must be more than {context['gt']}, not {shown(value)}.", ""


def _at_most(value: Any, context: Mapping[str, Any], written: str | None) -> Message:
    return f"must be at most {context['le']}, not {shown(value)}.", ""


def _too_many(value: Any, context: Mapping[str, Any], written: str | None) -> Message:
    return f"has more than {context['max_length']} entries.", "Put them into a file of the code folder."


def _too_long(value: Any, context: Mapping[str, Any], written: str | None) -> Message:
    return f"has {len(value)} characters; at most {context['max_length']} are allowed.", "Shorten it."


def _empty(value: Any, context: Mapping[str, Any], written: str | None) -> Message:
    return "is empty.", "Fill it in, or remove the key."


def _pattern(value: Any, context: Mapping[str, Any], written: str | None) -> Message:
    return f"is not the digest of a bundle: {shown(value)}.", "Write sha256: and 64 lower-case hexadecimal digits."


def _own(value: Any, context: Mapping[str, Any], written: str | None) -> Message:
    """A ValueError of our own validators: "what is wrong; what to write"."""
    what, _, hint = str(context.get("error", "is not valid")).partition("; ")
    if isinstance(value, str | int | float) and what.startswith("is not"):
        what = f"{shown(value)} {what}"
    return f"{what}.", f"{hint[:1].upper()}{hint[1:]}." if hint else ""


def _other(value: Any, context: Mapping[str, Any], written: str | None) -> Message:
    return f"cannot be {shown(value)}.", "See the schema: /api/v1/schemas/job.json."


_MESSAGES: Final[dict[str, Callable[[Any, Mapping[str, Any], str | None], Message]]] = {
    "missing": _missing,
    "string_type": _string,
    "int_type": _whole_number,
    "int_from_float": _whole_number,
    "float_type": _number,
    "finite_number": _number,
    "bool_type": _truth,
    "list_type": _list,
    "dict_type": _mapping,
    "model_type": _mapping,
    "literal_error": _choice,
    "greater_than_equal": _at_least,
    "greater_than": _more_than,
    "less_than_equal": _at_most,
    "too_long": _too_many,
    "string_too_long": _too_long,
    "string_too_short": _empty,
    "string_pattern_mismatch": _pattern,
    "value_error": _own,
}
