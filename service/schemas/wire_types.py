"""What the parts of the job file's model share: the strict base class, and values with units as types.

Not for: the parts themselves (`job_spec`, `training_wire`).
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, WithJsonSchema

from service.schemas.units import MAX_SECONDS, parse_duration, parse_size


class WireModel(BaseModel):
    """Base of the parts of a job file."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


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
