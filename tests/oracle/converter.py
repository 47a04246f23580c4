"""Runs llama.cpp's ``convert_hf_to_gguf.py``, many times in one process: ``python -m tests.oracle.converter FOLDER`` reads a
JSON list of lists of arguments from stdin, and writes a list with, for each, "" or what it ended with.

``FOLDER`` is llama.cpp's.  The script runs as it is but for four things.  Two of them are for tiny vocabularies: it
recognizes the division of texts into words by a digest of the ids of a text, which no tiny vocabulary has, and so takes
GPT-2's here; and the vocabulary of a mixture of Hunyuan comes from code in the model's own repository, in place of which it
is read from ``tokenizer.json`` like that of other models.  The third one: configurations of Step 3.5 list the kinds of layers
that draft, too, which ``transformers`` refuses in a model that it does not know.  The fourth one: it refuses a DeepSeek V3.2
whose ``add_bos_token`` is not true, and ``transformers`` 5 drops this value.
"""

import json
import logging
import os
import runpy
import sys
import traceback
from pathlib import Path


class Last(logging.Handler):
    """Keeps the last error that was logged."""

    said = ""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR:
            self.said = record.getMessage()


def convert(script: Path, arguments: list[str], log: int) -> str:
    """Run the script in a child, since what it is told stays in attributes of its classes."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.argv = [str(script), *arguments]
        last, end = Last(), ""
        logging.basicConfig(level=logging.INFO, handlers=[logging.StreamHandler(), last])
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as stop:
            end = last.said or str(stop.code) if stop.code else ""
        except Exception as error:
            traceback.print_exc()
            end = f"{type(error).__name__}: {error}"
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(writing, end.encode()[:4096])
        os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8", errors="replace") as pipe:
        end = pipe.read()
    _, status = os.waitpid(child, 0)
    return end or (f"ended with status {status}" if status else "")


def main() -> None:
    folder = Path(sys.argv[1])
    sys.path[:0] = [str(folder), str(folder / "gguf-py")]
    from conversion import get_model_class  # type: ignore[import-not-found]
    from conversion.base import TextModel  # type: ignore[import-not-found]
    from transformers import PreTrainedConfig

    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    kept = [check for check in PreTrainedConfig.__class_validators__ if check.__name__ != "validate_layer_type"]
    PreTrainedConfig.__class_validators__ = kept
    for name in ("HunYuanMoEV1ForCausalLM", "DeepseekV32ForCausalLM"):
        get_model_class(name).set_vocab = TextModel._set_vocab_gpt2
    ends = [convert(folder / "convert_hf_to_gguf.py", arguments, 2) for arguments in json.load(sys.stdin)]
    json.dump(ends, sys.stdout)


if __name__ == "__main__":
    main()
