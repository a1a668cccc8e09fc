#!/usr/bin/env python3
"""PyTorch trains a small model (DistributedDataParallel) through the plugin and through NCCL's Socket transport: the losses
of every step, and whether they are the same. Ranks share one GPU, each a host of its own to NCCL, so that every gradient
goes over the network. `ci/gpu train` runs it; the interpreter that runs this file must have PyTorch with CUDA.

With algorithm, protocol and channels of NCCL pinned, sums have one order whatever carries them: losses and parameters must
be equal bit by bit. Left to NCCL they must be close. A control trains each rank alone: each must come out differently from all
together and from each other, else nothing was shown about what goes between them.
Exit status 3: no PyTorch or no GPU here."""

import argparse
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEPS = 20
# Orders of summation differ by about 1e-7 a step.
CLOSE = 1e-3
ROOT = Path(__file__).resolve().parent.parent

PATHS = {
    "host": {"NCCL_NET_GDR_LEVEL": "LOC"},
    "dmabuf": {"NCCL_NET_GDR_LEVEL": "SYS", "NCCL_DMABUF_ENABLE": "1", "NCCL_NET_RDMA_PEERMEM": "off"},
    "staging": {"NCCL_NET_GDR_LEVEL": "SYS", "NCCL_NET_RDMA_GPU_PATH": "staging"},
}
PINNED = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple", "NCCL_MIN_NCHANNELS": "1", "NCCL_MAX_NCHANNELS": "1"}
# Kernels of all ranks must fit on the GPU at once.
FREE = {"NCCL_MAX_NCHANNELS": "2"}


# One rank.


def train(rank: int, ranks: int, store: str, alone: bool) -> dict:
    """Trains; the losses of all steps, averaged over the ranks, and a digest of the parameters."""
    import torch
    import torch.distributed as dist
    from torch import nn

    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.cuda.set_device(0)
    torch.manual_seed(1)
    width, classes = 512, 10
    layers = [nn.Linear(64, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()]
    model = nn.Sequential(*layers, nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, classes)).cuda()
    # What is to be learnt is the same for all ranks, what they see of it is not.
    teacher = torch.randn(64, classes, generator=torch.Generator().manual_seed(2))
    shard = torch.Generator().manual_seed(100 + rank)
    trained = model
    if not alone:
        dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=ranks)
        # Several buckets, so that they are summed while the rest is still computed.
        trained = nn.parallel.DistributedDataParallel(model, device_ids=[0], bucket_cap_mb=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        inputs = torch.randn(256, 64, generator=shard)
        targets = (inputs @ teacher).argmax(dim=1)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(trained(inputs.cuda()), targets.cuda())
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        if not alone:
            dist.all_reduce(mean)
            mean /= ranks
        losses.append(mean.item())
    torch.cuda.synchronize()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        # Without numpy, which PyTorch does not need.
        digest.update(bytes(parameter.detach().cpu().flatten().view(torch.uint8).tolist()))
    if not alone:
        dist.destroy_process_group()
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {"losses": losses, "parameters": digest.hexdigest(), "torch": torch.__version__, "nccl": nccl}


# All ranks.


class Failed(Exception):
    pass


class Launcher:
    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.deadline = time.monotonic() + args.time_limit
        self.logs = Path(args.log_dir)
        self.logs.mkdir(parents=True, exist_ok=True)

    def environment(self, net: str, path: str, pinned: bool) -> dict:
        env = {"NCCL_NET": net, "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV"}
        env |= PINNED if pinned else FREE
        if net == "Socket":
            return env | {"NCCL_NET_PLUGIN": "none"}
        plugin = Path(self.args.plugin).resolve()
        word = plugin.stem.removeprefix("libnccl-net-")
        search = ":".join(filter(None, [str(plugin.parent), os.environ.get("LD_LIBRARY_PATH")]))
        env |= PATHS[path] | {"NCCL_NET_PLUGIN": word, "NCCL_NET_PLUGIN_REF_COUNT": "1", "LD_LIBRARY_PATH": search}
        return env | {"NCCL_IBVERBS_LIB": self.args.adapter, "SOFT_HCA_FABRIC": self.args.fabric}

    def run(self, net: str, path: str = "", pinned: bool = True, alone: bool = False) -> dict:
        """A set of ranks. The result of rank 0, to which the others' parameters must be equal, and the parameters of each."""
        name = "-".join(filter(None, ["alone" if alone else net, path, "pinned" if pinned else "free"]))
        name = f"train-{name}-{self.args.ranks}ranks"
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            processes, logs = [], []
            for rank in range(self.args.ranks):
                log = self.logs / f"{name}-rank{rank}.log"
                log.unlink(missing_ok=True)
                logs.append(log)
                env = os.environ | self.environment(net, path, pinned)
                env |= {"NCCL_HOSTID": f"train-host{rank}", "SOFT_HCA_HOST": f"h{rank}", "NCCL_DEBUG_FILE": str(log)}
                # cuBLAS is deterministic with this alone.
                env["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
                command = [sys.executable, __file__, "--rank", str(rank), "--ranks", str(self.args.ranks)]
                command += ["--store", f"{folder}/store", "--result", f"{folder}/{rank}.json"] + ["--alone"] * alone
                with open(self.logs / f"{name}-rank{rank}.out", "wb") as out:
                    processes.append(subprocess.Popen(command, env=env, stdout=out, stderr=out))
            self.wait(name, processes)
            results = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(self.args.ranks)]
        if not alone:
            if len({result["parameters"] for result in results}) != 1:
                raise Failed(f"{name}: the ranks have different parameters in the end")
            for log in logs:
                self.proven(log, net, path)
        print(f"{name}: {STEPS} steps, loss {results[0]['losses'][0]:.6f} to {results[0]['losses'][-1]:.6f}, "
              f"{time.monotonic() - began:.1f} s", flush=True)
        return results[0] | {"everywhere": [result["parameters"] for result in results]}

    def last_words(self, name: str, rank: int) -> str:
        """What a rank printed last, and where the rest and NCCL's log are."""
        file = self.logs / f"{name}-rank{rank}.out"
        lines = file.read_text(errors="replace").splitlines() if file.exists() else []
        return "\n    ".join([f"{file}, NCCL's log is {file.with_suffix('.log')}:"] + lines[-12:])

    def wait(self, name: str, processes: list) -> None:
        """Ends all as soon as one fails."""
        try:
            while any(process.poll() is None for process in processes):
                if any(process.poll() for process in processes):
                    # The others may be about to tell why.
                    time.sleep(2)
                    break
                if time.monotonic() > self.deadline:
                    late = [rank for rank, process in enumerate(processes) if process.poll() is None]
                    raise Failed(f"{name}: ranks {late} were still running when the time was up (--time-limit "
                                 f"{self.args.time_limit:g}); of rank {late[0]} {self.last_words(name, late[0])}")
                time.sleep(0.1)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.send_signal(signal.SIGKILL)
                process.wait()
        failed = [rank for rank, process in enumerate(processes) if process.returncode]
        # Those that were killed above only follow from another.
        failed.sort(key=lambda rank: processes[rank].returncode == -signal.SIGKILL)
        for rank in failed:
            raise Failed(f"{name}: rank {rank} ended with {processes[rank].returncode}; {self.last_words(name, rank)}")

    def proven(self, log: Path, net: str, path: str) -> None:
        """NCCL's own log must name the network, and of every channel the way of the data."""
        text = log.read_text(errors="replace")
        used = {line.split("Using network ", 1)[1].strip() for line in text.splitlines() if "Using network " in line}
        channels = [line.split(" via NET/", 1)[1] for line in text.splitlines() if " via NET/" in line]
        direct = sum("/GDRDMA" in channel for channel in channels)
        want = len(channels) if path in ("dmabuf", "staging") else 0
        # To NCCL staging looks like GPUDirect; the plugin says which it is.
        staged = ": staging; " in text
        if used != {net} or not channels or not all(channel.startswith(f"{net}/") for channel in channels):
            raise Failed(f"{log}: NCCL used {used or 'no network'}, channels {sorted(set(channels))}; expected {net}")
        if direct != want or staged != (path == "staging"):
            raise Failed(f"{log}: {direct} of {len(channels)} channels with GPUDirect, staged: {staged}; this is path {path}")


def far(one: dict, other: dict) -> float:
    """The largest relative difference of two losses of a step."""
    pairs = zip(one["losses"], other["losses"], strict=True)
    return max(abs(a - b) / max(abs(b), 1e-9) for a, b in pairs)


def compare(results: dict) -> list:
    """What is wrong with the results, by (network, path, pinned)."""
    wrong = []
    reference, free = results["Socket", "", True], results["Socket", "", False]
    if not reference["losses"][-1] < reference["losses"][0]:
        wrong.append("the loss does not fall: nothing was learnt")
    for (net, path, pinned), result in results.items():
        name = f"{net} {path} {'pinned' if pinned else 'free'}"
        # Nothing that is compared with a number that is none is unequal, or far.
        if not all(math.isfinite(loss) for loss in result["losses"]):
            wrong.append(f"{name}: a loss is no number")
        elif net == "alone":
            if reference["parameters"] in result["everywhere"]:
                wrong.append("a rank alone comes to the same parameters as all together: gradients were not summed")
            if len(set(result["everywhere"])) < len(result["everywhere"]):
                wrong.append("two ranks, each alone, come to the same parameters: they saw the same data")
        elif net == "RDMA" and pinned:
            if result["losses"] != reference["losses"] or result["parameters"] != reference["parameters"]:
                wrong.append(f"{name} is not equal to Socket bit by bit: losses differ by up to {far(result, reference):.3g}")
        elif net == "RDMA" and not far(result, free) <= CLOSE:
            wrong.append(f"{name}: losses differ by up to {far(result, free):.3g} from Socket's")
    return wrong


def table(results: dict) -> str:
    heads = ["".join(filter(None, [net, f" {path}" if path else "", "" if pinned else ", free"]))
             for net, path, pinned in results]
    lines = ["step  " + "  ".join(f"{head:>15}" for head in heads)]
    for step in range(STEPS):
        lines.append(f"{step:4}  " + "  ".join(f"{result['losses'][step]:15.9f}" for result in results.values()))
    return "\n".join(lines)


def launch(args: argparse.Namespace) -> int:
    try:
        import torch
    except ImportError as error:
        print(f"ci/gpu-train.py: no PyTorch in {sys.executable} ({error})", file=sys.stderr)
        return 3
    if not torch.cuda.is_available():
        print(f"ci/gpu-train.py: PyTorch {torch.__version__} finds no GPU", file=sys.stderr)
        return 3
    launcher = Launcher(args)
    paths = args.paths.split(",")
    sets = [("Socket", "", True), *[("RDMA", path, True) for path in paths], ("Socket", "", False)]
    sets += [("RDMA", paths[-1], False), ("alone", "", True)]
    results = {}
    try:
        for net, path, pinned in sets:
            alone = net == "alone"
            results[net, path, pinned] = launcher.run("Socket" if alone else net, path, pinned, alone)
    except Failed as failure:
        print(f"FAIL {failure}", file=sys.stderr)
        return 1
    first = results["Socket", "", True]
    print(f"\nPyTorch {first['torch']}, NCCL {first['nccl']}, {args.ranks} ranks on one GPU; loss of each step, mean over the ranks")
    print("pinned to Ring, Simple and one channel, or free; 'alone' is rank 0 without the others, a control")
    print(table(results))
    wrong = compare(results)
    for what in wrong:
        print(f"FAIL {what}", file=sys.stderr)
    if not wrong:
        difference = far(results["RDMA", paths[-1], False], results["Socket", "", False])
        print(f"pinned: losses and parameters of {', '.join(paths)} are equal to Socket's bit by bit; "
              f"free: losses differ by {difference:.3g} at most")
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--paths", default="host,dmabuf,staging", help=f"ways of GPU data: {', '.join(PATHS)}")
    parser.add_argument("--plugin", default=str(ROOT / "dist/lib/libnccl-net-rdma.so"))
    parser.add_argument("--adapter", default=str(ROOT / "dist/soft-hca/libibverbs.so.1"))
    parser.add_argument("--fabric", default=str(ROOT / "soft-hca/examples/gpu.toml"))
    parser.add_argument("--log-dir", default=str(ROOT / ".cache/gpu"))
    parser.add_argument("--time-limit", type=float, default=300, metavar="S")
    # Of one rank, for this program itself.
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is None:
        return launch(args)
    result = train(args.rank, args.ranks, args.store, args.alone)
    Path(args.result).write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
