"""An answer in JSON that becomes an object of a class, with pydantic: python examples/parse.py"""

from pydantic import BaseModel, Field

import bitmirror


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)


with bitmirror.load(n_ctx=256) as llm:
    answer = llm.complete("person = ", schema=Person, max_tokens=64, seed=1)
    print(isinstance(answer.parsed, Person), answer.parsed)
