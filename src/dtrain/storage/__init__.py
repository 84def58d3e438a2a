"""Create, write, sync, rename, list, remove and read files, on this machine or on a server.

No other package touches files.
"""

from dtrain.storage.files import FileReader as FileReader
from dtrain.storage.files import create_file as create_file
from dtrain.storage.files import exists as exists
from dtrain.storage.files import file_size as file_size
from dtrain.storage.files import free_bytes as free_bytes
from dtrain.storage.files import is_folder as is_folder
from dtrain.storage.files import link_file as link_file
from dtrain.storage.files import list_names as list_names
from dtrain.storage.files import list_sizes as list_sizes
from dtrain.storage.files import make_folder as make_folder
from dtrain.storage.files import make_folders as make_folders
from dtrain.storage.files import read_file as read_file
from dtrain.storage.files import remove_file as remove_file
from dtrain.storage.files import remove_folder as remove_folder
from dtrain.storage.files import rename as rename
from dtrain.storage.files import replace_file as replace_file
from dtrain.storage.files import supports_rename as supports_rename
from dtrain.storage.files import sync_folder as sync_folder
from dtrain.storage.files import walk_files as walk_files
from dtrain.storage.files import write_file as write_file
from dtrain.storage.files import write_parts as write_parts
from dtrain.storage.local import Buffer as Buffer
from dtrain.storage.local import FileWriter as FileWriter
from dtrain.storage.local import FolderEntry as FolderEntry
from dtrain.storage.local import LockableFile as LockableFile
from dtrain.storage.local import append_line as append_line
from dtrain.storage.local import make_private_folder as make_private_folder
from dtrain.storage.local import modified_ns as modified_ns
from dtrain.storage.local import real_path as real_path
from dtrain.storage.local import scan_folder as scan_folder
from dtrain.storage.path import AnyPath as AnyPath
from dtrain.storage.path import RemotePath as RemotePath
from dtrain.storage.path import resolve_path as resolve_path
from dtrain.storage.remote import TransferProgress as TransferProgress
