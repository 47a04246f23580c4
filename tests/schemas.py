"""Answers with the JSON schemas of a public collection: each parses, is valid, and is the same with drafts.

``python -m tests.schemas FOLDER -n 1000`` takes files from a folder, such as ``maskbench/data`` of
https://github.com/guidance-ai/jsonschemabench.  ``tests/grammar/test_schemas.py`` takes those that are in the package
schemastore, if it is installed.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import referencing.exceptions

import engine
from engine import Grammar, SpeculationParams
from engine.errors import UsageError

PROMPT = "value = "
PLAIN = SpeculationParams(enabled=False)
LOOKUP = SpeculationParams(lookup=True)

HURRY = 8.0
"""What is added to the logits of tokens that end a value or the answer, so that most answers end."""


@dataclass(frozen=True)
class Result:
    """What became of a schema, and details: "refused"; "failed" (a limit), "unfinished", "valid" or "invalid", of its answer;
    "differs", with drafts; "unknown", if jsonschema cannot tell."""

    outcome: str
    details: str = ""


def from_folder(folder: Path) -> Iterator[tuple[str, Any]]:
    """The schemas of a folder by file name; a file is a schema, or has it under the key "schema"."""
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        yield path.stem, found["schema"] if isinstance(found, dict) and set(found) >= {"schema", "tests"} else found


def validator_of(schema: Any) -> jsonschema.protocols.Validator | None:
    """The validator that the package jsonschema has for a schema; None if it does not accept the schema."""
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError:
        return None
    return kind(schema, format_checker=kind.FORMAT_CHECKER)


def check(llm: engine.LLM, schema: Any, seed: int = 1, max_tokens: int = 300) -> Result:
    """Answer with a schema, with drafts of lookup and without."""
    ends = [*(llm.tokenizer.encode(mark)[-1] for mark in '"]}'), *llm.tokenizer.eog_ids]
    marks = dict.fromkeys(ends, HURRY)
    given: dict[str, Any] = {"seed": seed, "max_tokens": max_tokens, "logit_bias": marks}
    try:
        given["grammar"] = Grammar.json_schema(schema)
        answers = [llm.generate(PROMPT, speculation=speculation, **given) for speculation in (PLAIN, LOOKUP)]
    except UsageError as error:
        return Result("refused", str(error))
    errors = []
    for answer in answers:
        try:
            "".join(answer)
        except UsageError as error:
            errors.append(str(error))
    if answers[0].ids != answers[1].ids or len(errors) == 1:
        return Result("differs", f"{answers[0].text!r} {answers[1].text!r} {errors}")
    if errors:
        return Result("failed", errors[0])
    text = answers[0].text
    if answers[0].finish_reason != "stop":
        return Result("unfinished", text)
    try:
        # Year 0 is a date of RFC 3339, and of the checker as soon as it is another leap year.
        value = json.loads(text.replace('"0000-', '"2000-'))
    except ValueError as error:
        return Result("invalid", f"{error} {text}")
    validator = validator_of(schema)
    if validator is None:
        return Result("unknown", "jsonschema does not accept the schema")
    try:
        wrong = jsonschema.exceptions.best_match(validator.iter_errors(value))
    except referencing.exceptions.Unresolvable as unresolved:
        return Result("unknown", str(unresolved))
    return Result("valid", text) if wrong is None else Result("invalid", f"{wrong.message[:300]} {text}")


def main() -> None:
    """Check some schemas of a folder and print what became of them, and each answer that is not right."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("-m", "--model", help="a model; by default the bundled one")
    parser.add_argument("-n", type=int, default=100, help="schemas, chosen at random (100)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--refused", action="store_true", help="print why schemas are refused")
    args = parser.parse_args()
    schemas = list(from_folder(args.folder))
    chosen = np.random.default_rng(args.seed).permutation(len(schemas))[: args.n]
    counts: Counter[str] = Counter()
    with engine.load(args.model, device=args.device, n_ctx=512) as llm:
        for i in chosen:
            name, schema = schemas[i]
            result = check(llm, schema, int(i))
            counts[result.outcome] += 1
            if result.outcome in ("invalid", "differs", "failed") or (args.refused and result.outcome == "refused"):
                print(f"{name}: {result.outcome}: {result.details}", flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main()
