"""The README's own code runs, and what it names exists."""

import re
from pathlib import Path

import dtrain as dt
import public
from stand_ins import Namespace, documents, namespace

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)


def names() -> Namespace:
    return namespace(dataset=documents(30_000))


def test_readme_loop_trains_and_resumes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loop = BLOCKS[0]
    assert 'loader.until("3ep")' in loop
    exec(loop.replace('until("3ep")', 'until("1ep")'), names())
    assert [found.step for found in dt.checkpoint.list_steps("ckpt")] == [118]
    exec(loop, names())
    assert [found.step for found in dt.checkpoint.list_steps("ckpt")] == [118, 236, 354]
    assert list(dt.loggers.read_jsonl("run.jsonl")) == [100, 200, 300]


def test_readme_manual_step_trains():
    scope = names()
    with dt.init_dist():
        exec(BLOCKS[1], scope)
    assert scope["state"].step == 1


STRATEGIES = {"full_shard", "shard_grad_op", "hybrid_shard", "replicate"}


def test_every_name_in_the_table_exists_in_its_namespace():
    table = README.split("## What is here")[1].split("\n## ")[0]
    door, wrong, count = "dt", [], 0
    for row in table.split("\n|")[3:]:
        head, cell = row.split("|")[:2]
        door = next(iter(re.findall(r"`(dt[.\w]*)`", head)), door)
        names = set(re.findall(r"`([A-Za-z_]+)`", cell)) - STRATEGIES
        count += len(names)
        wrong += [f"{door}.{name}" for name in names if not public.is_public(f"{door}.{name}")]
    assert wrong == []
    assert count > 100
