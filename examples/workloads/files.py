"""What all loaders say of a file that is not as it should be."""

from pathlib import Path


def existing(data: Path, name: str, form: str, folder: str = "") -> Path:
    """The file of this name in the directory, or in the folder that its archive unpacks to.

    Args:
      data: the directory that the user names.
      name: of the file.
      form: what it should be, and where it comes from.
      folder: of the archive.

    Raises:
      ValueError: if there is no such file.
    """
    if not data.is_dir():
        raise ValueError(f"data={str(data)!r} is not a directory")
    for path in (data / name, data / folder / name):
        if path.is_file():
            return path
    raise ValueError(f"{data / name} is missing: {form}")


def complaint(path: Path, wrong: str, form: str) -> ValueError:
    """The error to raise for a file that is there, but is not what it should be."""
    return ValueError(f"{path} {wrong}; it should be {form}")
