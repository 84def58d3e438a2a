"""The only package that touches files: create, write, sync, rename, list, remove, read a range."""

from dtrain.storage.local import (
    Buffer,
    FileReader,
    FileWriter,
    append_line,
    exists,
    file_size,
    is_folder,
    list_names,
    make_folder,
    make_folders,
    read_file,
    real_path,
    remove_folder,
    rename,
    sync_folder,
    write_file,
)

__all__ = [
    "Buffer",
    "FileReader",
    "FileWriter",
    "append_line",
    "exists",
    "file_size",
    "is_folder",
    "list_names",
    "make_folder",
    "make_folders",
    "read_file",
    "real_path",
    "remove_folder",
    "rename",
    "sync_folder",
    "write_file",
]
