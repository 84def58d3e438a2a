"""Edit a model before sharding: replace modules, and change attention, normalization and dropout.

    model = build_model()
    model = dt.surgery.blur_pool(model)
    model = dt.surgery.squeeze_excite(model, min_channels=64)
    model = dt.shard_model(model, dt.build_mesh(), blocks=(Block,))

Every edit returns the model. ``replace_modules`` returns a ``SurgeryReport`` with the model and the replaced modules.
"""

from typing import TYPE_CHECKING

from dtrain.lazy_imports import attach

if TYPE_CHECKING:
    from dtrain.surgery.attention import AlibiMultiheadAttention as AlibiMultiheadAttention
    from dtrain.surgery.attention import add_alibi_bias as add_alibi_bias
    from dtrain.surgery.attention import alibi as alibi
    from dtrain.surgery.attention import alibi_bias as alibi_bias
    from dtrain.surgery.attention import alibi_slopes as alibi_slopes
    from dtrain.surgery.convolutions import SqueezeExcite2d as SqueezeExcite2d
    from dtrain.surgery.convolutions import blur_2d as blur_2d
    from dtrain.surgery.convolutions import blur_kernel as blur_kernel
    from dtrain.surgery.convolutions import blur_pool as blur_pool
    from dtrain.surgery.convolutions import channels_last as channels_last
    from dtrain.surgery.convolutions import squeeze_excite as squeeze_excite
    from dtrain.surgery.convolutions import standardize_weight as standardize_weight
    from dtrain.surgery.convolutions import weight_standardization as weight_standardization
    from dtrain.surgery.dropout import GyroDropout as GyroDropout
    from dtrain.surgery.dropout import drop_by_masks as drop_by_masks
    from dtrain.surgery.dropout import drop_rates as drop_rates
    from dtrain.surgery.dropout import drop_samples as drop_samples
    from dtrain.surgery.dropout import gyro_dropout as gyro_dropout
    from dtrain.surgery.dropout import stochastic_depth as stochastic_depth
    from dtrain.surgery.dropout import subnetwork_masks as subnetwork_masks
    from dtrain.surgery.layers import FactorizedConv2d as FactorizedConv2d
    from dtrain.surgery.layers import FactorizedLinear as FactorizedLinear
    from dtrain.surgery.layers import GatedLinearUnit as GatedLinearUnit
    from dtrain.surgery.layers import factorize as factorize
    from dtrain.surgery.layers import factorize_matrix as factorize_matrix
    from dtrain.surgery.layers import gated_linear_units as gated_linear_units
    from dtrain.surgery.normalization import LowPrecisionGroupNorm as LowPrecisionGroupNorm
    from dtrain.surgery.normalization import LowPrecisionLayerNorm as LowPrecisionLayerNorm
    from dtrain.surgery.normalization import LowPrecisionRMSNorm as LowPrecisionRMSNorm
    from dtrain.surgery.normalization import fused_layer_norm as fused_layer_norm
    from dtrain.surgery.normalization import ghost_batch_norm as ghost_batch_norm
    from dtrain.surgery.normalization import ghost_batches as ghost_batches
    from dtrain.surgery.normalization import low_precision_group_norm as low_precision_group_norm
    from dtrain.surgery.normalization import low_precision_layer_norm as low_precision_layer_norm
    from dtrain.surgery.replace import SurgeryReport as SurgeryReport
    from dtrain.surgery.replace import replace_modules as replace_modules

__getattr__, __dir__ = attach(__name__, __file__)
