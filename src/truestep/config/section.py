"""The base of every section of the configuration, and the types that options share."""

import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
SOURCE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,60}")
SourceName = Annotated[str, Field(pattern=rf"^{SOURCE_NAME.pattern}$")]  # the name of one of several sources of prompts
ImportPath = Annotated[str, Field(pattern=r"^[^:\s]+:[^:\s]+$")]  # package.module:function
OR_OFF = BeforeValidator(lambda value: "off" if value is False else value)  # YAML reads an unquoted off as false
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Section(BaseModel):
    """A section of the configuration. Unknown options are errors; the docstring below an option is its description."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)


def by_type(default: str | None = None) -> Discriminator:
    """Return a pydantic discriminator that chooses a section's class by its option `type`, with this default."""

    def read_type(value: Any) -> Any:
        return value.get("type", default) if isinstance(value, dict) else getattr(value, "type", None)

    return Discriminator(read_type)
