"""Reads of a checkpoint that take longer than ``--hang-timeout``: the launcher hears that they get on."""

import pytest

TIMEOUT_S = 12  # every read takes a fraction of it, all of them together more
SHORT_TIMEOUT_S = 10  # the same in little

SCRIPT = """
    import os, sys, time
    import torch
    import torch._dynamo  # optimizers import it, which may take as long as the timeout on a busy machine
    import dtrain as dt
    from dtrain.launch import heartbeats
    from dtrain.dist.collectives import all_gather_numbers

    dt.save_sharded, dt.load_sharded, dt.compose_step, dt.checkpoint.verify  # modules load at the first use

    kind, chunks, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])

    def slow_down():
        fast = os.preadv

        def slow(handle, buffers, begin):
            size = sum(map(len, buffers))
            if size > 2**16:
                time.sleep(seconds * size / 2**22)  # a chunk may be read in pieces
            return fast(handle, buffers, begin)

        os.preadv = slow

    def init_state():
        heartbeats.heartbeat("build")
        model = torch.nn.Module()
        model.weight = torch.nn.Parameter(torch.zeros(chunks, 1024, 1024))  # of 4 MiB each
        step = dt.compose_step(dt.mean_loss(lambda m, x: m.weight.mean(), weight=len))
        return step.init(model, torch.optim.SGD(model.parameters()))

    with dt.init_dist(device="cpu") as info:
        dt.save_sharded("ckpt", init_state())
        state = init_state()
        heartbeats.heartbeat("built")
        begun = time.monotonic()
        slow_down()
        if kind == "load_sharded":  # by two threads
            dt.load_sharded("ckpt", state)
        elif kind == "load_weights_":
            dt.load_weights_(state.model, "ckpt")
        elif info.rank == 0:  # as of older steps, when the newest one is damaged
            dt.checkpoint.verify("ckpt")
        all_gather_numbers([0.0])
        print("took", time.monotonic() - begun)
"""


@pytest.mark.costly
def test_loading_checkpoint_longer_than_timeout_is_not_a_hang(start, tmp_path):
    check_jobs(start, tmp_path, {"load_sharded": (14, 1.8)}, timeout_s=SHORT_TIMEOUT_S)


@pytest.mark.slow  # a minute, most of it waiting
def test_reading_checkpoint_longer_than_timeout_is_not_a_hang(start, tmp_path):
    slowness = {"load_sharded": (16, 2.0), "load_weights_": (16, 2.0), "verify": (16, 1.0)}
    check_jobs(start, tmp_path, slowness, timeout_s=TIMEOUT_S)


def check_jobs(start, tmp_path, slowness, *, timeout_s):
    """Run one job for each kind of reading, with so many chunks and seconds for each of them."""
    jobs = {}
    for kind, (chunks, seconds) in slowness.items():
        folder = tmp_path / kind
        folder.mkdir()
        options = ["--hang-timeout", str(timeout_s), "--grace", "0.5", "--run-dir", str(folder / "run")]
        arguments = [kind, str(chunks), str(seconds)]
        jobs[kind] = start(SCRIPT, *arguments, n=1 if kind != "verify" else 2, options=options, cwd=folder)
    for kind, job in jobs.items():
        result = job.wait()
        assert result.code == 0, (kind, result.err)
        took = [float(line.rpartition("took ")[2]) for line in result.out.splitlines() if "took " in line]
        assert min(took) > timeout_s, kind
