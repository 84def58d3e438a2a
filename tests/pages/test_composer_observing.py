"""docs/composer_observing.md: all of Composer's classes with all of their options, and every name of ours is there."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

import dtrain as dt
import public

PAGE = (Path(dt.__file__).parents[2] / "docs" / "composer_observing.md").read_text()
ROWS = {name: (here, options) for name, here, options in re.findall(r"^\| `(\w+)` \| (.*?) \| (.*) \|$", PAGE, re.M)}
_OF_THE_TRACE = "filename remote_file_name overwrite num_traces_to_keep"

# Of mosaicml 0.32.1: what __all__ of composer.callbacks, composer.loggers and composer.profiler has, and the arguments of each.
COMPOSER = {
    "ActivationMonitor": "interval ignore_module_types only_log_wandb",
    "CheckpointSaver": "folder filename remote_file_name latest_filename latest_remote_file_name save_interval overwrite "
    "num_checkpoints_to_keep weights_only ignore_keys num_concurrent_uploads upload_timeout_in_seconds",
    "EarlyStopper": "monitor dataloader_label comp min_delta patience",
    "EvalOutputLogging": "",  # in the documentation, not in __all__
    "ExportForInferenceCallback": "save_format save_path save_object_store sample_input transforms input_names output_names",
    "FreeOutputs": "",
    "Generate": "prompts interval batch_size",
    "ImageVisualizer": "interval mode num_images channels_last input_key target_key",
    "LoadCheckpoint": "load_path load_weights_only strict_model_weights ignore_keys event",
    "LRMonitor": "",
    "MemoryMonitor": "memory_keys dist_aggregate_batch_interval",
    "MemorySnapshot": "skip_batches interval max_entries folder filename remote_file_name overwrite",
    "MLPerfCallback": "root_folder index benchmark target division metric_name metric_label submitter system_name status "
    "cache_clear_cmd host_processors_per_node exit_at_target",
    "NaNMonitor": "",
    "OOMObserver": "max_entries folder filename remote_file_name overwrite",
    "OptimizerMonitor": "log_optimizer_metrics batch_log_interval",
    "RuntimeEstimator": "skip_batches time_unit",
    "SpeedMonitor": "window_size gpu_flops_available time_unit",
    "SystemMetricsMonitor": "log_all_data",
    "ThresholdStopper": "monitor dataloader_label threshold comp stop_on_batch",
    "CometMLLogger": "workspace project_name log_code log_graph name rank_zero_only exp_kwargs",
    "ConsoleLogger": "log_interval stream log_traces",
    "FileLogger": "filename remote_file_name capture_stdout capture_stderr buffer_size log_traces flush_interval overwrite",
    "InMemoryLogger": "",
    "Logger": "state destinations",
    "LoggerDestination": "",
    "MLFlowLogger": "experiment_name run_name tags tracking_uri rank_zero_only flush_interval model_registry_prefix "
    "model_registry_uri synchronous log_system_metrics rename_metrics ignore_metrics ignore_hyperparameters run_group resume "
    "logging_buffer_seconds log_duplicated_metric_every_n_steps",
    "MosaicMLLogger": "log_interval ignore_keys ignore_exceptions",
    "NeptuneLogger": "project api_token rank_zero_only upload_checkpoints base_namespace mode",
    "ProgressBarLogger": "stream log_traces",
    "RemoteUploaderDownloader": "bucket_uri backend_kwargs file_path_format_string num_concurrent_uploads "
    "upload_staging_folder use_procs num_attempts",
    "SlackLogger": "include_keys formatter_func log_interval max_logs_per_message slack_logging_api_key channel_id",
    "TensorboardLogger": "log_dir flush_interval rank_zero_only",
    "WandBLogger": "project group name entity tags log_artifacts rank_zero_only init_kwargs",
    "JSONTraceHandler": f"folder merged_trace_filename merged_trace_remote_file_name {_OF_THE_TRACE}",
    "Marker": "state should_record trace_handlers name record_instant_on_start record_instant_on_finish categories",
    "Profiler": "schedule trace_handlers sys_prof_cpu sys_prof_memory sys_prof_disk sys_prof_net "
    "sys_prof_stats_thread_interval_seconds torch_prof_folder torch_prof_filename torch_prof_remote_file_name "
    "torch_prof_memory_filename torch_prof_memory_remote_file_name torch_prof_overwrite torch_prof_use_gzip "
    "torch_prof_record_shapes torch_prof_profile_memory torch_prof_with_stack torch_prof_with_flops "
    "torch_prof_num_traces_to_keep",
    "ProfilerAction": "",
    "SystemProfiler": "profile_cpu profile_memory profile_disk profile_net stats_thread_interval_seconds",
    "TorchProfiler": "folder memory_filename memory_remote_file_name use_gzip record_shapes profile_memory with_stack "
    f"with_flops {_OF_THE_TRACE}",
    "TraceHandler": "",
    "cyclic_schedule": "skip_first wait warmup active repeat",
}


def found(name: str) -> object:
    """Resolve a name on the page: a name of dtrain, or a path."""
    assert public.is_public(name), f"dtrain has no {name}"
    return public.value(f"dtrain.{name}")


def test_every_composer_class_has_a_row():
    assert set(ROWS) == set(COMPOSER)


@pytest.mark.parametrize("name", COMPOSER)
def test_every_composer_option_is_in_its_row(name):
    assert [option for option in COMPOSER[name].split() if f"`{option}`" not in ROWS[name][1]] == []


@pytest.mark.parametrize("name", COMPOSER)
def test_every_dtrain_name_in_a_row_exists_with_its_options(name):
    here, options = ROWS[name]
    names = re.findall(r"`([\w.]+)`", here)
    assert names or here == "-"
    assert all(callable(found(one)) for one in names)
    given = re.findall(r"`([\w.]+)\((\w+)=[^`]*\)`", options)
    missing = [f"{one}({option}=)" for one, option in given if option not in inspect.signature(found(one)).parameters]
    assert missing == []


def test_every_path_in_the_page_can_be_imported():
    paths = set(re.findall(r"`(dtrain\.[\w.]+)`", PAGE))
    assert len(paths) >= 3
    parts = [path.rpartition(".") for path in paths]
    assert [name for module, _, name in parts if not hasattr(importlib.import_module(module), name)] == []


def test_custom_sink_receives_metrics_and_step():
    scope: dict[str, object] = {"dt": dt}
    block = "".join(re.findall(r"```python\n(.*?)```", PAGE, re.S))
    exec(block, scope)
    logged = []

    class Experiment:
        def log_metrics(self, numbers, step):
            logged.append((step, dict(numbers)))

    sink = scope["comet"](Experiment())
    sink(10, {"loss": 0.5})
    sink.close()
    assert logged == [(10, {"loss": 0.5})]
