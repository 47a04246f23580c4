"""The function and the form of the answer as types, for clients that make schemas of types."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

City = Literal["Bern", "Lima", "Oslo"]
Days = Annotated[int, Field(ge=1, le=7)]


class Report(BaseModel):
    """A report on the weather."""

    model_config = ConfigDict(extra="forbid")

    city: City
    degrees: int = Field(ge=-60, le=60)
    advice: str = Field(max_length=40)


class Weather(BaseModel):
    """The weather of a city in the next days."""

    model_config = ConfigDict(extra="forbid")

    city: City
    days: Days


class Place(BaseModel):
    """A place, and whether it is warm there."""

    model_config = ConfigDict(extra="forbid")

    city: City
    warm: bool
