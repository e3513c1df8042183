"""What the parts of the job file's model share: the strict base class, and values with units as types.

Not for: the parts themselves (`job_spec`, `training_wire`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, WithJsonSchema
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import core_schema

from service.domain.priority import LEAST_PRIORITY, MOST_PRIORITY, PRIORITY_WORDS, read_priority
from service.schemas.units import MAX_SECONDS, parse_duration, parse_size


class WireModel(BaseModel):
    """Base of the parts of a job file."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


@dataclass(frozen=True)
class OrMapping:
    """Annotation of a type: a mapping is read as `model`, with its faults at their own places; the rest as before."""

    model: type[WireModel]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_wrap_validator_function(self._read, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"anyOf": [handler(schema), handler(self.model.__pydantic_core_schema__)]}

    def _read(self, value: Any, read_other: core_schema.ValidatorFunctionWrapHandler) -> Any:
        return self.model.model_validate(value) if isinstance(value, dict) else read_other(value)


def list_of_at_most(limit: int) -> BeforeValidator:
    """Checked before the elements are: each wrong one costs an error, and a megabyte holds half a million."""

    def check(value: Any) -> Any:
        if isinstance(value, list) and len(value) > limit:
            raise ValueError(f"has {len(value)} entries, at most {limit} are allowed")
        return value

    return BeforeValidator(check)


Duration = Annotated[
    float,
    BeforeValidator(parse_duration),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "pattern": r"^\s*([0-9]+(\.[0-9]+)?(ms|[dhms])\s*)+$"},
                {"type": "number", "minimum": 0, "maximum": MAX_SECONDS},
            ]
        }
    ),
]
Size = Annotated[
    int,
    BeforeValidator(parse_size),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "pattern": r"^\s*[0-9]+(\.[0-9]+)?\s*([kKmMgGtT][iI]?)?[bB]\s*$"},
                {"type": "integer", "minimum": 0},
            ]
        }
    ),
]
Priority = Annotated[
    int,
    BeforeValidator(read_priority),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": list(PRIORITY_WORDS)},
                {"type": "integer", "minimum": LEAST_PRIORITY, "maximum": MOST_PRIORITY},
            ]
        }
    ),
]
