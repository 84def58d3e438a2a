"""Rows: low precision, and microbatches that fit."""

import dtrain as dt
from battery.row import Row

ROWS: dict[str, Row] = {
    "autocast": Row(make=lambda: dt.autocast("bf16"), of=("autocast",)),
    "loss_scale": Row(make=lambda: dt.loss_scale(1000.1, growth=1.3, interval=2), of=("loss_scale",), syncs=1),
    "auto_microbatch": Row(make=lambda: dt.auto_microbatch(), of=("auto_microbatch",), undoes=True),
    "auto_microbatch-from-2": Row(make=lambda: dt.auto_microbatch(initial=2), undoes=True),
}
