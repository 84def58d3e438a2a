"""Create, write, sync, rename, list, remove and read files, on this machine or on a server.

No other package touches files.
"""

from dtrain.storage.file_lock import FolderEntry, LockableFile, make_private_folder, modified_ns, scan_folder
from dtrain.storage.files import (
    FileReader,
    FileWriter,
    create_file,
    exists,
    file_size,
    free_bytes,
    is_folder,
    link_file,
    list_names,
    list_sizes,
    make_folder,
    make_folders,
    read_file,
    remove_file,
    remove_folder,
    rename,
    replace_file,
    supports_rename,
    sync_folder,
    walk_files,
    write_file,
    write_parts,
)
from dtrain.storage.local import Buffer, append_line, real_path
from dtrain.storage.path import AnyPath, RemotePath, resolve_path
from dtrain.storage.remote import TransferProgress

__all__ = [
    "AnyPath",
    "Buffer",
    "FileReader",
    "FileWriter",
    "FolderEntry",
    "LockableFile",
    "RemotePath",
    "TransferProgress",
    "append_line",
    "create_file",
    "exists",
    "file_size",
    "free_bytes",
    "is_folder",
    "link_file",
    "list_names",
    "list_sizes",
    "make_folder",
    "make_folders",
    "make_private_folder",
    "modified_ns",
    "read_file",
    "real_path",
    "remove_file",
    "remove_folder",
    "rename",
    "replace_file",
    "resolve_path",
    "scan_folder",
    "supports_rename",
    "sync_folder",
    "walk_files",
    "write_file",
    "write_parts",
]
