"""What ci/gpu-train.py, whose path is the argument, makes of results, and of ranks that never end; without PyTorch."""

import argparse
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

spec = importlib.util.spec_from_file_location("train", sys.argv[1])
train = importlib.util.module_from_spec(spec)
spec.loader.exec_module(train)


def result(losses, parameters, everywhere=None):
    return {"losses": losses, "parameters": parameters, "everywhere": everywhere or [parameters] * 2}


def results(free=(2.0, 1.0), alone=("a", "b")):
    return {
        ("Socket", "", True): result([2.0, 1.0], "x"),
        ("RDMA", "host", True): result([2.0, 1.0], "x"),
        ("Socket", "", False): result([2.0, 1.0], "y"),
        ("RDMA", "host", False): result(list(free), "y"),
        ("alone", "", True): result([3.0, 2.0], alone[0], list(alone)),
    }


def says(what, **changes):
    wrong = train.compare(results(**changes))
    assert len(wrong) == 1 and what in wrong[0], wrong


assert train.compare(results()) == []
says("losses differ", free=(2.0, 1.1))
says("no number", free=(2.0, float("nan")))
says("no number", free=(float("inf"), 1.0))
says("gradients were not summed", alone=("a", "x"))
says("the same data", alone=("a", "a"))

with tempfile.TemporaryDirectory() as folder:
    launcher = train.Launcher(argparse.Namespace(log_dir=folder, time_limit=0.2))
    Path(folder, "train-x-rank1.out").write_text("one\nloading\n")
    processes = [subprocess.Popen(["sleep", "0"]), subprocess.Popen(["sleep", "60"])]
    processes[0].wait()
    try:
        launcher.wait("train-x", processes)
        raise AssertionError("a rank that never ends has not failed")
    except train.Failed as failure:
        text = str(failure)
    assert "ranks [1] were still running" in text and "train-x-rank1.log" in text and text.endswith("loading"), text
