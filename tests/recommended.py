"""Files that recommend sampling parameters, written by gguf-py."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
from gguf.scripts.gguf_new_metadata import MetadataDetails, copy_with_new_metadata

from engine.hub.catalog import CATALOG, model_file

KINDS = {int: gguf.GGUFValueType.INT32, float: gguf.GGUFValueType.FLOAT32, str: gguf.GGUFValueType.STRING}


def header(path: Path, values: Mapping[str, Any]) -> Path:
    """A file without tensors with keys ``general.sampling.*``: whole numbers are i32, others f32, lists arrays."""
    writer = gguf.GGUFWriter(path, "qwen3")
    for name, value in values.items():
        key = f"general.sampling.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_key_value(key, value, KINDS[type(value)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def model(path: Path, values: Mapping[str, Any]) -> Path:
    """A copy of the small bundled model with such keys."""
    reader = gguf.GGUFReader(model_file(CATALOG["pycoder-draft"]))
    writer = gguf.GGUFWriter(path, "qwen3")
    added = {f"general.sampling.{name}": MetadataDetails(KINDS[type(each)], each) for name, each in values.items()}
    copy_with_new_metadata(reader, writer, added, [])
    return path
