"""Names that tables of docs/from_*.md may have, by page and section: those of the releases in the comments."""

COMPOSER_TRAINER = """
model train_dataloader train_dataloader_label train_subset_num_batches spin_dataloaders max_duration algorithms
algorithm_passes optimizers schedulers scale_schedule_ratio step_schedulers_every_batch eval_dataloader eval_interval
eval_subset_num_batches callbacks loggers run_name progress_bar log_to_console console_stream console_log_interval log_traces
auto_log_hparams load_path load_object_store load_weights_only load_strict_model_weights load_progress_bar load_ignore_keys
load_exclude_algorithms save_folder save_filename save_latest_filename save_overwrite save_interval save_weights_only
save_ignore_keys save_num_checkpoints_to_keep save_metrics autoresume parallelism_config device precision precision_config
device_train_microbatch_size accumulate_train_batch_on_tokens seed deterministic_mode dist_timeout ddp_sync_strategy profiler
python_log_level compile_config
"""
COMPOSER_FIT = """
train_dataloader train_dataloader_label train_subset_num_batches spin_dataloaders duration reset_time schedulers
scale_schedule_ratio step_schedulers_every_batch eval_dataloader eval_subset_num_batches eval_interval
device_train_microbatch_size precision
"""
COMPOSER_EVENTS = """
INIT BEFORE_LOAD AFTER_LOAD FIT_START ITERATION_START EPOCH_START BEFORE_DATALOADER AFTER_DATALOADER BATCH_START
BEFORE_TRAIN_BATCH BEFORE_FORWARD AFTER_FORWARD BEFORE_LOSS AFTER_LOSS BEFORE_BACKWARD AFTER_BACKWARD AFTER_TRAIN_BATCH
BATCH_END BATCH_CHECKPOINT EPOCH_END EPOCH_CHECKPOINT ITERATION_END ITERATION_CHECKPOINT FIT_END EVAL_BEFORE_ALL EVAL_START
EVAL_BATCH_START EVAL_BEFORE_FORWARD EVAL_AFTER_FORWARD EVAL_BATCH_END EVAL_END EVAL_AFTER_ALL EVAL_STANDALONE_START
EVAL_STANDALONE_END PREDICT_START PREDICT_BATCH_START PREDICT_BEFORE_FORWARD PREDICT_AFTER_FORWARD PREDICT_BATCH_END
PREDICT_END
"""
COMPOSER_LAUNCHER = """
-n --nproc --stdout --stderr -v --verbose -m --module_mode -c --command_mode --world_size --base_rank --node_rank
--master_addr --master_port --version training_script training_script_args
"""
COMPOSER_OTHERS = """
eval predict save_checkpoint export_for_inference close ComposerModel.forward ComposerModel.loss ComposerModel.eval_forward
ComposerModel.update_metric ComposerModel.get_metrics HuggingFaceModel HuggingFaceModel.peft_config
HuggingFaceModel.should_save_peft_only write_huggingface_pretrained_from_composer_checkpoint
DataSpec.dataloader DataSpec.num_samples DataSpec.num_tokens
DataSpec.batch_transforms DataSpec.microbatch_transforms DataSpec.split_batch DataSpec.get_num_samples_in_batch
DataSpec.get_num_tokens_in_batch Evaluator.label Evaluator.dataloader Evaluator.metric_names Evaluator.subset_num_batches
Evaluator.eval_interval Evaluator.device_eval_microbatch_size
"""
COMPOSER_MODELS = """
HuggingFaceModel HuggingFaceModel.model HuggingFaceModel.tokenizer HuggingFaceModel.use_logits HuggingFaceModel.metrics
HuggingFaceModel.eval_metrics HuggingFaceModel.shift_labels HuggingFaceModel.allow_embedding_resizing
HuggingFaceModel.peft_config HuggingFaceModel.should_save_peft_only HuggingFaceModel.forward HuggingFaceModel.eval_forward
HuggingFaceModel.loss HuggingFaceModel.get_metrics HuggingFaceModel.update_metric HuggingFaceModel.generate
HuggingFaceModel.get_metadata HuggingFaceModel.state_dict HuggingFaceModel.hf_from_composer_checkpoint
HuggingFaceModel.load_huggingface_tokenizer_from_saved_state HuggingFaceModel.load_huggingface_model_from_saved_state
write_huggingface_pretrained_from_composer_checkpoint ComposerClassifier ComposerModel LanguageCrossEntropy LanguagePerplexity
MaskedAccuracy BinaryF1Score CrossEntropy MIoU Dice Generate soft_cross_entropy binary_cross_entropy_with_logits DiceLoss
"""
COMPOSER_OBSERVING = """
ActivationMonitor CheckpointSaver EarlyStopper ExportForInferenceCallback Generate ImageVisualizer LoadCheckpoint LRMonitor
MemoryMonitor MemorySnapshot NaNMonitor OOMObserver OptimizerMonitor RuntimeEstimator SpeedMonitor SystemMetricsMonitor
ThresholdStopper ConsoleLogger ProgressBarLogger FileLogger InMemoryLogger Logger LoggerDestination MLFlowLogger
TensorboardLogger WandBLogger CometMLLogger NeptuneLogger SlackLogger RemoteUploaderDownloader Profiler TorchProfiler
cyclic_schedule SystemProfiler JSONTraceHandler Marker
"""
COMPOSER_PARALLELISM = """
data_parallel_shard_degree data_parallel_replicate_degree reshard_after_forward sharding_strategy activation_checkpointing
activation_checkpointing_reentrant activation_cpu_offload auto_wrap backward_prefetch backward_prefetch_limit cpu_offload
forward_prefetch forward_prefetch_limit ignored_modules keep_low_precision_grads limit_all_gathers load_monolith_rank0_only
load_planner save_planner mixed_precision process_group sharded_ckpt_prefix_dir state_dict_type sync_module_states
use_orig_params te_checkpoint_wrapper te_shard_fp8_weight verbose tensor_parallel_degree layer_plan device_mesh
"""

DEEPSPEED_BATCH = """
train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping prescale_gradients
gradient_predivide_factor gradient_allreduce_op communication_data_type data_types.grad_accum_dtype dataloader_drop_last
"""
DEEPSPEED_PRECISION = """
bf16.enabled bf16.immediate_grad_update bf16.check_grad_overflow bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states
fp16.enabled fp16.auto_cast fp16.loss_scale fp16.initial_scale_power fp16.loss_scale_window fp16.hysteresis
fp16.consecutive_hysteresis fp16.min_loss_scale fp16.fp16_master_weights_and_grads torch_autocast.enabled torch_autocast.dtype
torch_autocast.lower_precision_safe_modules
"""
DEEPSPEED_ZERO = """
stage contiguous_gradients use_multi_rank_bucket_allreduce stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential
parameter_alignment compute_grad_norm stage3_module_granularity_threshold zero_quantized_nontrainable_weights
override_module_apply pipeline_loading_checkpoint legacy_stage1 log_trace_cache_warnings enable_sanity_checks
save_muon_momentum_buffer_in_memory reduce_scatter reduce_bucket_size allgather_partitions allgather_bucket_size overlap_comm
load_from_fp32_weights elastic_checkpoint offload_param offload_optimizer zenflow sub_group_size stage3_prefetch_bucket_size
stage3_param_persistence_threshold stage3_model_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance
stage3_gather_16bit_weights_on_model_save ignore_unused_parameters round_robin_gradients zero_hpz_partition_size
zero_quantized_weights zero_quantized_gradients memory_efficient_linear leaf_module
"""
DEEPSPEED_OFFLOAD = """
offload_param.device offload_param.nvme_path offload_param.buffer_count offload_param.buffer_size offload_param.max_in_cpu
offload_param.pin_memory offload_optimizer.device offload_optimizer.nvme_path offload_optimizer.buffer_count
offload_optimizer.pin_memory offload_optimizer.pipeline_read offload_optimizer.pipeline_write offload_optimizer.fast_init
offload_optimizer.ratio offload_optimizer.super_offload offload_optimizer.cpuadam_cores_perc
"""
DEEPSPEED_OPTIMIZERS = """
optimizer.type optimizer.params zero_allow_untested_optimizer zero_force_ds_cpu_optimizer LRRangeTest OneCycle WarmupLR
WarmupDecayLR WarmupCosineLR
"""
DEEPSPEED_OTHERS = """
activation_checkpointing.partition_activations activation_checkpointing.number_checkpoints
activation_checkpointing.contiguous_memory_optimization activation_checkpointing.synchronize_checkpoint_boundary
activation_checkpointing.profile activation_checkpointing.cpu_checkpointing flops_profiler.enabled flops_profiler.profile_step
flops_profiler.module_depth flops_profiler.top_modules flops_profiler.detailed flops_profiler.output_file
flops_profiler.recompute_fwd_factor wall_clock_breakdown memory_breakdown steps_per_print dump_state tensorboard wandb
csv_monitor comet comms_logger checkpoint.tag_validation checkpoint.load_universal checkpoint.use_node_local_storage
checkpoint.parallel_write compile tensor_parallel sequence_parallel_size
"""
DEEPSPEED_ENGINE = """
initialize forward backward step no_sync is_gradient_accumulation_boundary set_gradient_accumulation_boundary
get_global_grad_norm save_checkpoint load_checkpoint save_16bit_model zero_to_fp32.py offload_states train eval destroy
"""
DEEPSPEED_LAUNCHER = """
--hostfile --include --exclude --num_nodes --num_gpus --node_rank --master_addr --master_port --module --no_python
--enable_each_rank_log --bind_cores_to_rank --launcher --autotuning --num_accelerators --launcher_args --force_multi --no_ssh
--no_ssh_check --ssh_port --no_local_rank --bind_core_list --venv_script --save_pid --log_level --quiet
"""

ACCELERATOR = """
device_placement split_batches mixed_precision gradient_accumulation_steps cpu dataloader_config deepspeed_plugin fsdp_plugin
torch_tp_plugin megatron_lm_plugin rng_types log_with project_dir project_config gradient_accumulation_plugin
step_scheduler_with_optimizer kwargs_handlers dynamo_backend dynamo_plugin deepspeed_plugins parallelism_config
"""
ACCELERATE_METHODS = """
prepare prepare_model prepare_data_loader prepare_optimizer prepare_scheduler backward accumulate no_sync sync_gradients
clip_grad_norm_ clip_grad_value_ unscale_gradients optimizer_step_was_skipped autocast gather gather_for_metrics reduce
pad_across_processes join_uneven_inputs split_between_processes print is_main_process is_local_main_process on_main_process
on_local_main_process main_process_first local_main_process_first wait_for_everyone set_trigger check_trigger init_trackers log
get_tracker end_training save save_model save_state load_state register_for_checkpointing skip_first_batches unwrap_model
get_state_dict free_memory clear profile maybe_context_parallel device process_index local_process_index num_processes
trigger_sync_in_backward lomo_backward is_last_process on_last_process on_process on_local_process register_save_state_pre_hook
register_load_state_pre_hook torch_device_mesh data_parallel_rank data_parallel_shard_rank tensor_parallel_rank
context_parallel_rank pipeline_parallel_rank distributed_type use_distributed multi_device is_fsdp2
is_composable_parallelism_enabled verify_device_map deepspeed_ulysses_dl_adapter
"""
ACCELERATE_REPEATED = """
dispatch_batches even_batches fp8_backend logging_dir non_blocking save_iteration should_save_model use_seedable_sampler
use_stateful_dataloader
"""
"""Properties that repeat an argument, or a field of one."""
ACCELERATE_FSDP = """
fsdp_version sharding_strategy reshard_after_forward backward_prefetch mixed_precision_policy auto_wrap_policy
transformer_cls_names_to_wrap min_num_params cpu_offload ignored_modules state_dict_type state_dict_config
optim_state_dict_config limit_all_gathers use_orig_params param_init_fn sync_module_states forward_prefetch
activation_checkpointing activation_checkpointing_offload cpu_ram_efficient_loading
"""
ACCELERATE_LAUNCH = """
--num_processes --num_machines --machine_rank --main_process_ip --main_process_port --multi_gpu --cpu --mixed_precision
--module --no_python --max_restarts --log_dir --enable_cpu_affinity --config_file --use_fsdp --use_deepspeed --dynamo_backend
--gpu_ids --num_cpu_threads_per_process --rdzv_backend --rdzv_conf --same_network --role --monitor_interval --tee
"""

FABRIC = "accelerator strategy devices num_nodes precision plugins callbacks loggers"
FABRIC_METHODS = """
launch run setup setup_module setup_optimizers setup_dataloaders backward clip_gradients autocast to_device print barrier
broadcast all_gather all_reduce rank_zero_first no_backward_sync sharded_model init_tensor init_module save load load_raw call
log log_dict seed_everything global_rank local_rank node_rank world_size is_global_zero device
"""
FABRIC_STRATEGY = """
FSDPStrategy.sharding_strategy FSDPStrategy.auto_wrap_policy FSDPStrategy.activation_checkpointing_policy
FSDPStrategy.activation_checkpointing FSDPStrategy.cpu_offload FSDPStrategy.mixed_precision FSDPStrategy.state_dict_type
FSDPStrategy.device_mesh FSDPStrategy.timeout ModelParallelStrategy.parallelize_fn ModelParallelStrategy.data_parallel_size
ModelParallelStrategy.tensor_parallel_size ModelParallelStrategy.save_distributed_checkpoint DDPStrategy DeepSpeedStrategy
"""
FABRIC_RUN = "--accelerator --strategy --devices --num-nodes --node-rank --main-address --main-port --precision"

TITAN_TRAINING = """
training.local_batch_size training.global_batch_size training.seq_len training.max_norm training.steps
training.enable_cpu_offload training.disable_cuda_graphs training.dtype training.mixed_precision_param
training.mixed_precision_reduce training.gc_freq training.gc_debug
"""
TITAN_PARALLELISM = """
parallelism.data_parallel_replicate_degree parallelism.data_parallel_shard_degree parallelism.fsdp_reshard_after_forward
parallelism.enable_fsdp_symm_mem parallelism.tensor_parallel_degree parallelism.enable_sequence_parallel
parallelism.spmd_backend parallelism.pipeline_parallel_degree parallelism.pipeline_parallel_schedule
parallelism.pipeline_parallel_schedule_csv parallelism.pipeline_parallel_microbatch_size
parallelism.pipeline_parallel_layers_per_stage parallelism.pipeline_parallel_first_stage_less_layers
parallelism.pipeline_parallel_last_stage_less_layers parallelism.module_fqns_per_model_part
parallelism.context_parallel_ptrr_mask_key parallelism.context_parallel_degree parallelism.context_parallel_load_balancer
parallelism.expert_parallel_degree
"""
TITAN_CHECKPOINT = """
checkpoint.enable checkpoint.folder checkpoint.interval checkpoint.initial_load_path checkpoint.initial_load_model_only
checkpoint.initial_load_in_hf checkpoint.initial_load_in_hf_quantized checkpoint.last_save_model_only
checkpoint.last_save_in_hf checkpoint.export_dtype checkpoint.keep_latest_k checkpoint.load_step
checkpoint.exclude_from_loading checkpoint.enable_first_step_checkpoint checkpoint.create_seed_checkpoint checkpoint.load_only
checkpoint.async_mode
"""
TITAN_OTHERS = """
optimizer.param_groups optimizer.implementation optimizer.optimizer_factory_kwargs_by_name lr_scheduler.warmup_steps
lr_scheduler.total_steps lr_scheduler.decay_ratio lr_scheduler.decay_type lr_scheduler.min_lr_factor loss dataloader.dataset
dataloader.dataset_path dataloader.num_workers dataloader.persistent_workers dataloader.pin_memory dataloader.prefetch_factor
tokenizer hf_assets_path model_spec activation_checkpoint compile.enable compile.components compile.backend
compile.enable_async_tensor_parallel metrics.log_freq metrics.enable_tensorboard metrics.save_tb_folder metrics.enable_wandb
metrics.save_for_all_ranks metrics.disable_color_printing profiler.enable_profiling profiler.save_traces_folder
profiler.profile_freq profiler.profiler_warmup profiler.profiler_active profiler.profiler_repeat profiler.profiler_skip_first
profiler.profiler_skip_first_wait profiler.enable_memory_snapshot profiler.memory_snapshot_freq
profiler.save_memory_snapshot_folder profiler.memory_snapshot_max_entries profiler.trace_post_processor validator.enable
validator.freq validator.steps comm.init_timeout_seconds comm.train_timeout_seconds comm.trace_buf_size comm.save_traces_folder
comm.save_traces_file_prefix comm.mode debug.spmd_typechecking debug.seed debug.deterministic debug.deterministic_warn_only
debug.detect_anomaly debug.batch_invariant debug.moe_force_load_balance debug.print_config debug.save_config_file
debug.enable_structured_logging dump_folder override --module --config
"""
TITAN_EXPERTS = """
MoEArgs.num_experts MoEArgs.num_shared_experts MoEArgs.score_func MoEArgs.route_norm MoEArgs.route_scale
MoEArgs.score_before_experts MoEArgs.top_k MoEArgs.use_grouped_mm MoEArgs.load_balance_coeff expert_bias tokens_per_expert
"""
DEEPSPEED_EXPERTS = """
hidden_size expert num_experts ep_size k capacity_factor eval_capacity_factor min_capacity use_residual noisy_gate_policy
drop_tokens use_rts use_tutel enable_expert_tensor_parallelism l_aux exp_counts
"""
MEGABLOCKS = """
hidden_size ffn_hidden_size moe_num_experts moe_top_k moe_capacity_factor moe_normalize_expert_weights moe_loss_weight
moe_jitter_eps moe_expert_model_parallelism mlp_type mlp_impl activation_fn moe_zloss_weight uniform_expert_assignment
batched_load_balancing_loss
"""

DDP = """
init_process_group destroy_process_group mp.spawn torchrun set_device get_rank get_world_size manual_seed DistributedSampler
set_epoch DataLoader DistributedDataParallel no_sync find_unused_parameters join SyncBatchNorm autocast GradScaler
clip_grad_norm_ optimizer.step scheduler.step all_reduce all_gather all_gather_object broadcast broadcast_object_list barrier
torch.save torch.load tqdm cross_entropy linear_cross_entropy
"""

PAGES = {
    "from_composer.md": {  # mosaicml 0.32.1
        "Trainer": COMPOSER_TRAINER,
        "fit": COMPOSER_FIT,
        "Other methods, models and data": COMPOSER_OTHERS,
        "Events": COMPOSER_EVENTS,
        "Callbacks, loggers and the profiler": COMPOSER_OBSERVING,
        "parallelism_config": COMPOSER_PARALLELISM,
        "Launcher": COMPOSER_LAUNCHER,
        "Mixtures of experts": MEGABLOCKS,
    },
    "from_composer_models.md": {"Row by row": COMPOSER_MODELS},  # mosaicml 0.32.1
    "from_ddp.md": {"Call by call": DDP},  # torch 2.13.0
    "from_deepspeed.md": {  # deepspeed 0.19.8
        "Batches and gradients": DEEPSPEED_BATCH,
        "Precision": DEEPSPEED_PRECISION,
        "zero_optimization": DEEPSPEED_ZERO,
        "Offload": DEEPSPEED_OFFLOAD,
        "Optimizers and schedules": DEEPSPEED_OPTIMIZERS,
        "Everything else in the config": DEEPSPEED_OTHERS,
        "Mixtures of experts": DEEPSPEED_EXPERTS,
        "The engine": DEEPSPEED_ENGINE,
        "The launcher": DEEPSPEED_LAUNCHER,
    },
    "from_accelerate.md": {  # accelerate 1.15.0
        "Accelerator": ACCELERATOR,
        "Its methods": ACCELERATE_METHODS,
        "The FSDP plugin": ACCELERATE_FSDP,
        "accelerate launch": ACCELERATE_LAUNCH,
    },
    "from_fabric.md": {  # lightning-fabric 2.6.6
        "Fabric": FABRIC,
        "Its methods": FABRIC_METHODS,
        "Strategies": FABRIC_STRATEGY,
        "fabric run": FABRIC_RUN,
    },
    "from_torchtitan.md": {  # torchtitan 0.3.0
        "training": TITAN_TRAINING,
        "parallelism": TITAN_PARALLELISM,
        "checkpoint": TITAN_CHECKPOINT,
        "The other sections": TITAN_OTHERS,
        "Mixtures of experts": TITAN_EXPERTS,
    },
}
