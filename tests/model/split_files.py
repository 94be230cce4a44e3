"""Owns splitting a fixture into parts, by the writer of the gguf package."""

from pathlib import Path

import gguf


def split(source: Path, directory: Path, *, stem: str = "big", tensors_per_part: int = 20) -> list[Path]:
    """Write `source` as `STEM-0000i-of-0000N.gguf`; the paths, in order."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    directory.mkdir(exist_ok=True)
    writer = gguf.GGUFWriter(directory / f"{stem}.gguf", architecture, split_max_tensors=tensors_per_part)
    for key, field in reader.fields.items():
        if key != "general.architecture" and not key.startswith("GGUF."):
            item_type = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], item_type)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(directory.glob(f"{stem}-*.gguf"))
