"""Reads of a checkpoint that take longer than ``--hang-timeout``: the launcher hears that they get on."""

import pytest

TIMEOUT_S = 12  # every read takes a fraction of it, all of them together more

SCRIPT = """
    import os, sys, time
    import torch
    import dtrain as dt
    from dtrain import pulse
    from dtrain.dist.collectives import all_gather_numbers

    def slowed(seconds):
        fast = os.preadv

        def slow(handle, buffers, begin):
            if sum(map(len, buffers)) > 2**20:
                time.sleep(seconds)
            return fast(handle, buffers, begin)

        os.preadv = slow

    def new_state():
        pulse.beat("build")
        model = torch.nn.Module()
        model.weight = torch.nn.Parameter(torch.zeros(4096, 4096))  # 64 MiB: 16 chunks
        step = dt.compose_step(dt.mean_loss(lambda m, x: m.weight.mean(), weight=len))
        return step.init(model, torch.optim.SGD(model.parameters()))

    with dt.init_dist(device="cpu") as info:
        dt.save_sharded("ckpt", new_state())
        state = new_state()
        pulse.beat("built")
        begun = time.monotonic()
        if sys.argv[1] == "load_sharded":
            slowed(2)  # by two threads
            dt.load_sharded("ckpt", state)
        elif sys.argv[1] == "load_weights_":
            slowed(2)
            dt.load_weights_(state.model, "ckpt")
        elif info.rank == 0:  # as of older steps, when the newest one is damaged
            slowed(1)
            dt.verify_checkpoint("ckpt")
        all_gather_numbers([0.0])
        print("took", time.monotonic() - begun)
"""


@pytest.mark.slow  # a minute, most of it waiting
def test_reading_a_checkpoint_for_longer_than_the_timeout_is_no_hang(start, tmp_path):
    jobs = {}
    for kind in ("load_sharded", "load_weights_", "verify"):
        folder = tmp_path / kind
        folder.mkdir()
        options = ["--hang-timeout", str(TIMEOUT_S), "--grace", "0.5", "--run-dir", str(folder / "run")]
        jobs[kind] = start(SCRIPT, kind, n=1 if kind != "verify" else 2, options=options, cwd=folder)
    for kind, job in jobs.items():
        result = job.wait()
        assert result.code == 0, (kind, result.err)
        seconds = [float(line.rpartition("took ")[2]) for line in result.out.splitlines() if "took " in line]
        assert min(seconds) > TIMEOUT_S, kind
