"""What verification costs: its share of an engine step on a CPU, its bytes per second on a GPU.

usage: python tests/bench_verify.py cpu [--model smollm2] [--dtype auto] [--steps 60] [--threads N]
       python tests/bench_verify.py gpu [--batch-sizes 1,64,256] [--vocab-size V] [--repeats 50]

Where there is no GPU the second can be tried with TRITON_INTERPRET=1 in the environment and
--device cpu --vocab-size 300 --batch-sizes 2 --repeats 1; its figures mean nothing then.

cpu: batch 1, k = 5; the seconds in `verify`, from target logits to emitted ids, over the seconds of
the steps it was called in, schedule to draft; only steps that verify a draft count.
  greedy: ngram drafts. Limit 5 %.
  block: drafts drawn from one fixed random distribution over the full vocabulary; temperature 1,
  top_p 0.9. Limit 15 %. Also with the target's own temperature and no filter, for comparison.

gpu: k = 5, bfloat16 logits. The kernels of one step as a CUDA graph, timed by events over replays;
bytes are those the step must read, counted from its results: all rows once; for a sampled token its
row again, of draft probs all rows once for the check, and the residual's rows as the rule needs
them. `copy` is a device copy of 1 GiB in the same run, its bytes read and written. `torch` is the
reference on the same inputs, `verify` the kernels with their host side; both in wall time. Rows fit
the cache at B = 1, so that figure is not the memory's. top_p's ranking is timed apart: it is a part
of making the plan, which `verify` includes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from foresay.core.messages import SamplingData

K = 5
PLAIN = SamplingData(
    temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1, min_tokens=0, stop_token_ids=()
)


# -- share of an engine step ---------------------------------------------------------------------


def make_random_proposer() -> type[Any]:
    """A class that draws every draft from one random distribution."""
    from foresay.core.proposer import Draft, DraftInput, Needs, ProposerConfig, TargetView

    class RandomDrafts:
        needs = Needs(sampled=True)

        def __init__(self, config: ProposerConfig) -> None:
            self._logits = torch.empty(0)

        def load(self, target: TargetView) -> None:
            generator = torch.Generator().manual_seed(0)
            self._logits = torch.randn(1, target.vocab_size, generator=generator) * 3

        def propose(self, batch: DraftInput) -> Draft:
            drafts: list[list[int]] = [[] for _ in batch.requests]
            for step in range(max(request.k for request in batch.requests)):
                rows = [i for i, request in enumerate(batch.requests) if request.k > step]
                drawn = batch.sampler.draw(self._logits.expand(len(rows), -1), step, rows)
                for row, token_id in zip(rows, drawn.tolist(), strict=True):
                    drafts[row].append(token_id)
            return Draft(drafts)

    return RandomDrafts


def share_of_step(options: argparse.Namespace, proposer: Any, prompt: str, **params: Any) -> str:
    """Generate, and say which part of the verifying steps `verify` took."""
    from foresay import LLM, SamplingParams
    from foresay.core.plugins import PluginManager
    from foresay.core.worker import model_runner

    inner, verifying, steps = model_runner.verify, [0.0], []

    def timed(*arguments: Any, **keywords: Any) -> Any:
        start = time.perf_counter()
        results = inner(*arguments, **keywords)
        verifying[0] = time.perf_counter() - start
        return results

    def record(stats: Any) -> None:
        whole = (
            stats.schedule_seconds
            + stats.execute_seconds
            + stats.commit_seconds
            + stats.draft_seconds
        )
        if stats.num_draft_tokens:
            steps.append((verifying[0], whole, stats.num_draft_tokens))

    plugins = PluginManager.load()
    plugins.step_end = record  # type: ignore[method-assign]
    model_runner.verify = timed
    try:
        with LLM(
            model=options.model,
            proposer=proposer,
            num_speculative_tokens=K,
            verification="block",
            dtype=options.dtype,
            plugins=plugins,
            enable_prefix_caching=False,
            adaptive=False,
        ) as llm:
            settings = SamplingParams(max_tokens=options.steps, ignore_eos=True, **params)
            messages = [{"role": "user", "content": prompt}]
            llm.chat(messages, settings)  # warms up
            steps.clear()
            llm.chat(messages, settings)
    finally:
        model_runner.verify = inner
    shares = [seconds / whole for seconds, whole, _ in steps]
    share = sum(seconds for seconds, _, _ in steps) / sum(whole for _, whole, _ in steps)
    return (
        f"{len(steps):4} steps, {statistics.mean(k for _, _, k in steps):.1f} drafts, "
        f"verify {1e3 * statistics.median(s for s, _, _ in steps):6.2f} ms of "
        f"{1e3 * statistics.median(w for _, w, _ in steps):6.1f} ms: {100 * share:5.2f} % "
        f"(steps: median {100 * statistics.median(shares):.2f}, most {100 * max(shares):.2f})"
    )


def cpu(options: argparse.Namespace) -> None:
    """Both cases of the limit, and one without a filter."""
    if options.threads:
        torch.set_num_threads(options.threads)
    text = "One swallow does not make a summer, neither does one fine day. " * 6
    prompt = f"Repeat this text word for word, again and again: {text}"
    drawn = make_random_proposer()
    print(f"{options.model}, batch 1, k = {K}, {torch.get_num_threads()} threads")
    print("greedy, ngram          ", share_of_step(options, "ngram", prompt, temperature=0.0))
    sampled = {"temperature": 1.0, "seed": 1}
    print("block, top_p 0.9       ", share_of_step(options, drawn, prompt, top_p=0.9, **sampled))
    print("block, no filter       ", share_of_step(options, drawn, prompt, **sampled))


# -- bytes per second ----------------------------------------------------------------------------


def seconds_per_run(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the time of one run: of a CUDA graph's replays by events, else by the clock."""
    if device.type != "cuda":
        return wall_seconds(run, device, repeats)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # compile, and warm up
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / repeats


def wall_seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median wall time of runs that wait for their result."""
    times = []
    for _ in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:] or times)


def copy_speed(device: torch.device, repeats: int) -> float:
    """Return the bytes read and written per second of a device copy."""
    source = torch.empty(2**30 if device.type == "cuda" else 2**20, dtype=torch.uint8).to(device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_per_run(lambda: target.copy_(source), device, repeats)


def make_requests(
    rule: str, batch_size: int, logits: torch.Tensor, sampling: SamplingData
) -> list[Any]:
    """Drafts that are right in about 7 places of 10, or drawn from a distribution nearby."""
    from foresay.core.worker.draft_sampler import DraftProbs
    from foresay.core.worker.rejection_sampler import VerifyRequest, verify

    generator = torch.Generator(device=logits.device).manual_seed(2)
    length = 100
    if rule in ("greedy", "deterministic"):
        singles = [
            VerifyRequest(
                "r", [], range(length + row % (K + 1)), 1, replace(sampling, seed=row // (K + 1))
            )
            for row in range(len(logits))
        ]
        right = torch.tensor([r.token_ids[0] for r in verify(logits, singles, backend="triton")])
        wrong = torch.rand(len(right), generator=torch.Generator().manual_seed(3)) > 0.7
        tokens = torch.where(wrong, (right + 1) % logits.shape[1], right).reshape(batch_size, -1)
        return [
            VerifyRequest(
                str(i), tokens[i, :K].tolist(), range(length), 1, replace(sampling, seed=i)
            )
            for i in range(batch_size)
        ]
    requests = []
    for i, rows in enumerate(logits.view(batch_size, K + 1, -1)):
        noise = torch.randn(rows[:K].shape, generator=generator, device=logits.device)
        probs = (rows[:K].float() + 0.3 * noise).softmax(dim=-1)
        draft = probs.multinomial(1, generator=generator).squeeze(1).tolist()
        kept = DraftProbs(rule, length, probs)  # type: ignore[arg-type]
        requests.append(
            VerifyRequest(str(i), draft, range(length), 1, replace(sampling, seed=i), kept)
        )
    return requests


def bytes_read(rule: str, logits: torch.Tensor, requests: Sequence[Any], plan: Any) -> int:
    """Return the bytes of logits and draft probs that this step cannot do without."""
    row, draft_row = logits[0].nbytes, 4 * logits.shape[1]
    total = len(logits) * row
    results = plan.results()
    if rule == "deterministic":
        total += sum(len(result.token_ids) for result in results) * row
    elif rule != "greedy":
        total += len(requests) * K * draft_row
        for request, result in zip(requests, results, strict=True):
            is_residual = len(result.token_ids) <= len(request.draft_token_ids)
            total += row + is_residual * draft_row
    if rule == "block":
        scale = torch.ones(len(requests), dtype=torch.float64)
        ratios = plan.ratios().reshape(len(requests), K + 1)
        for i in range(1, K):
            scale = (scale * ratios[:, i - 1]).clamp(max=1)
            total += int(((scale > 0) & (scale < 1)).sum()) * (row + draft_row)
    return total


def gpu(options: argparse.Namespace) -> None:
    """Every rule at every batch size; then top_p, whose ranking is apart."""
    from foresay.core.worker.rejection_sampler import verify
    from foresay.core.worker.triton_sampler import VerifyPlan

    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("error: there is no GPU here; see --help for how to try the script")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "interpreter"
    copied = copy_speed(device, options.repeats)
    print(f"{name}, V = {options.vocab_size}, k = {K}, bfloat16; copy {copied / 1e9:.0f} GB/s")
    print("rule                 B  tokens   kernels us    MB   GB/s  of copy   torch ms verify ms")
    generator = torch.Generator().manual_seed(1)
    cases = [(rule, 1.0) for rule in ("greedy", "deterministic", "rejection", "block")]
    for batch_size in map(int, options.batch_sizes.split(",")):
        shape = (batch_size * (K + 1), options.vocab_size)
        logits = (3 * torch.randn(shape, generator=generator)).to(device, torch.bfloat16)
        for rule, top_p in [*cases, ("block", 0.9)]:
            temperature = 0.0 if rule == "greedy" else 1.0
            sampling = replace(PLAIN, temperature=temperature, top_p=top_p)
            requests = make_requests(rule, batch_size, logits, sampling)
            plan = VerifyPlan(logits, requests)
            seconds = seconds_per_run(plan.launch, device, options.repeats)
            results = plan.results()
            num_bytes = bytes_read(rule, logits, requests, plan)
            times = [
                wall_seconds(
                    lambda b=backend, r=requests, x=logits: verify(x, r, backend=b),  # type: ignore[misc]
                    device,
                    3,
                )
                for backend in ("torch", "triton")
            ]
            expected = verify(logits, requests, backend="torch")
            num_equal = sum(a == b for a, b in zip(results, expected, strict=True))
            label = rule if top_p == 1 else f"{rule}, top_p {top_p}"
            print(
                f"{label:18} {batch_size:3} {sum(len(r.token_ids) for r in results):7} "
                f"{1e6 * seconds:12.1f} {num_bytes / 1e6:5.0f} {num_bytes / seconds / 1e9:6.0f} "
                f"{100 * num_bytes / seconds / copied:6.1f} % {1e3 * times[0]:10.2f} "
                f"{1e3 * times[1]:9.2f}"
                + ("" if num_equal == batch_size else f"  {batch_size - num_equal} differ"),
                flush=True,
            )


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(required=True)
    on_cpu = parts.add_parser("cpu")
    on_cpu.add_argument("--model", default="smollm2")
    on_cpu.add_argument("--dtype", default="auto")
    on_cpu.add_argument("--steps", type=int, default=60, help="tokens to generate in each case")
    on_cpu.add_argument("--threads", type=int, default=0, help="0: as torch chooses")
    on_cpu.set_defaults(run=cpu)
    on_gpu = parts.add_parser("gpu")
    on_gpu.add_argument("--batch-sizes", default="1,64,256")
    on_gpu.add_argument("--vocab-size", type=int, default=128256)
    on_gpu.add_argument("--repeats", type=int, default=50)
    on_gpu.add_argument("--device", default="cuda")
    on_gpu.set_defaults(run=gpu)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
