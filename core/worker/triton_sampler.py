"""The host side of the verification kernels: from requests to tensors, launches, and back.

Knows the requests of a step and their parameters, and which kernels a batch needs. Does not know
the rules' arithmetic (`kernels` does; `rejection_sampler` is its reference in torch, which says
what each rule is and why it is exact), nor logprobs.

Only what a request uses costs: rows with processors are processed into a buffer of their own, rows
with top_k or top_p are ranked in torch, and a launch that no request needs is left out. Needs
triton, and logits on a GPU or Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
import triton

from foresay.core.proposer import draft_depths
from foresay.core.worker.draft_sampler import DraftProbs
from foresay.core.worker.filter_bounds import filter_bounds, is_filtered
from foresay.core.worker.kernels import rejection, rows
from foresay.core.worker.rejection_sampler import VerifyRequest, VerifyResult, drawn_from
from foresay.core.worker.sampling import Row, RowError, greedy_token, is_greedy, target_probs

_MASK_64 = (1 << 64) - 1
_INTERPRETED_BLOCK = 2**18  # a tile per row: what costs in the interpreter is the number of tiles
_BLOCK = 2048
_MAX_TILES = 4  # of a program, once there are rows enough to keep a GPU busy
_BUSY = 4096  # programs
_RANKED_AT_ONCE = 64  # rows: ranking needs a few times their memory


@dataclass(frozen=True, slots=True)
class Tuning:
    """How rows are shared out among programs. Changes the speed and the rounding of sums."""

    block: int  # logits in a tile: a power of two, at least 4
    num_tiles: int  # in a program
    num_warps: int = 8

    @classmethod
    def choose(cls, num_rows: int, vocab_size: int, device: torch.device) -> Tuning:
        """Return what suits a batch of this size."""
        if device.type == "cpu":
            return cls(min(max(triton.next_power_of_2(vocab_size), 16), _INTERPRETED_BLOCK), 1)
        block = min(max(triton.next_power_of_2(vocab_size), 16), _BLOCK)
        num_tiles = num_rows * -(-vocab_size // block) // _BUSY
        return cls(block, min(max(num_tiles, 1), _MAX_TILES))


@torch.inference_mode()
def verify(logits: torch.Tensor, requests: Sequence[VerifyRequest]) -> list[VerifyResult]:
    """Verify every request's draft, as `rejection_sampler.verify` does, without logprobs."""
    if not requests:
        return []
    plan = VerifyPlan(logits, requests)
    plan.launch()
    return plan.results()


class VerifyPlan:
    """One step's verification: made from requests, launched, read.

    A plan may be launched any number of times, as by a CUDA graph; it gives the same results while
    the logits and draft probs it was made for hold the same. `launch` neither allocates nor waits.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        requests: Sequence[VerifyRequest],
        tuning: Tuning | None = None,
    ) -> None:
        """`logits` [num_rows, vocab_size]: the rows of all requests in order; only read."""
        if logits.device.type == "cpu" and isinstance(
            rejection.decide_kernel, triton.runtime.JITFunction
        ):
            raise ValueError(
                "logits on the CPU, but the Triton kernels need them on a GPU; without one they "
                "run in Triton's interpreter: set TRITON_INTERPRET=1 before triton is imported"
            )
        self._logits = logits if logits.stride(1) == 1 else logits.contiguous()
        self._requests = requests
        self._tables = _Tables(requests, logits.shape[1], logits.device)
        num_rows, vocab_size = logits.shape
        tuning = tuning or Tuning.choose(num_rows, vocab_size, logits.device)
        self._num_warps = tuning.num_warps
        chunk = tuning.block * tuning.num_tiles
        self._num_splits = -(-vocab_size // chunk)
        columns = -(-self._tables.max_columns // self._num_splits)
        self._contexts = [request.context() for request in requests]
        self._buffer_places = [-1] * num_rows  # of processed rows in their buffer; -1: none
        self._arguments: dict[str, Any] = {
            "vocab_size": vocab_size,
            "block": tuning.block,
            "chunk": chunk,
            "column_chunk": max(-(-columns // tuning.block), 1) * tuning.block,
            "num_splits": self._num_splits,
            "max_splits": triton.next_power_of_2(self._num_splits),
            "logits_ptr": self._logits,
            "logits_stride": self._logits.stride(0),
            "has_drawn": self._tables.has_drawn,
            "has_maps": self._tables.has_maps,
            **self._tables.arguments,
            **self._processed(),
            **self._buffers(),
        }
        self._arguments |= self._bounds()

    def launch(self) -> None:
        """Run the kernels, each that a request of this batch needs."""
        tables, device = self._tables, self._logits.device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self._run_by_split(rows.row_statistics_kernel)
            self._run(rows.merge_statistics_kernel, self._num_rows)
            if tables.needs_min_p_sums:
                self._run_by_split(rows.min_p_sums_kernel)
                self._run(rows.merge_statistics_kernel, self._num_rows)
            if tables.has_drawn:
                self._run_by_split(rejection.draft_sums_kernel)
            if tables.has_blocks:
                self._run_by_split(rejection.block_residual_kernel)
            self._run(rejection.decide_kernel, len(self._requests))
            if tables.has_sampled:
                self._run_by_split(rejection.race_kernel)
                self._run(rejection.emit_kernel, len(self._requests))

    def results(self) -> list[VerifyResult]:
        """Wait for the last launch and return its results, in the order of the requests."""
        outputs = self._arguments["outputs_ptr"].tolist()
        results = []
        first_row = 0
        for i, (request, output) in enumerate(zip(self._requests, outputs, strict=True)):
            last_row = output[rejection.LAST_ROW.value]
            result = VerifyResult()
            if output[rejection.BAD_DRAFT_PROBS.value] or self._tables.has_wrong_probs[i]:
                result.faults["bad_draft_probs"] = 1
            if output[rejection.ZERO_RESIDUAL.value]:
                result.faults["zero_residual"] = 1
            if output[rejection.FAILED.value]:
                row = Row(self._logits[first_row + last_row], self._contexts[i], last_row)
                result.error = f"at position {row.position}, {_reason(row)}"
            else:
                result.accepted = list(self._contexts[i].drafts_before(last_row))
                result.token_ids = [request.draft_token_ids[place] for place in result.accepted]
                result.token_ids.append(output[rejection.TOKEN.value])
            results.append(result)
            first_row += request.num_rows
        return results

    def ratios(self) -> torch.Tensor:
        """Return, after a launch, each drawn token's target prob over its draft prob: [num_rows].

        On the CPU; float64. For measurements: rows without a drawn token hold anything.
        """
        ratios: torch.Tensor = self._arguments["ratios_ptr"].cpu()
        return ratios

    @property
    def _num_rows(self) -> int:
        return self._logits.shape[0]

    def _run_by_split(self, kernel: Any) -> None:
        self._run(kernel, self._num_rows * self._num_splits, self._num_warps)

    def _run(self, kernel: Any, num_programs: int, num_warps: int = 1) -> None:
        arguments = {name: self._arguments[name] for name in kernel.arg_names}
        kernel[(num_programs,)](**arguments, num_warps=num_warps, enable_fp_fusion=True)

    def _processed(self) -> dict[str, Any]:
        """Process the rows that ask for it into a buffer, and note their places there."""
        places = self._buffer_places
        processed: list[torch.Tensor] = []
        used: list[int] = []
        row = 0
        for request, context in zip(self._requests, self._contexts, strict=True):
            for index in range(request.num_rows):
                if context.uses_processors(index):
                    places[row] = len(used)
                    used.append(row)
                    processed.append(context.process(self._logits[row], index))
                row += 1
        device = self._logits.device
        if used:
            buffer = torch.stack(processed)
            # A ban must not hide that the row could not be used to begin with.
            tops = self._logits[torch.tensor(used, device=device)].amax(dim=1)
            buffer.masked_fill_(~tops.isfinite().unsqueeze(1), torch.nan)
        else:
            buffer = self._tables.floats.new_empty((1, 1))
        return {
            "processed_ptr": buffer,
            "processed_rows_ptr": torch.tensor(places, device=device),
            "has_processed": bool(used),
        }

    def _bounds(self) -> dict[str, Any]:
        """Rank the rows that have top_k or top_p, and say which logits they keep."""
        vocab_size = self._logits.shape[1]
        samplings = list(chain.from_iterable([r.sampling] * r.num_rows for r in self._requests))
        filtered = [
            row
            for row, sampling in enumerate(samplings)
            if not is_greedy(sampling) and is_filtered(sampling, vocab_size)
        ]
        device = self._logits.device
        bounds = torch.full((self._num_rows, 2), -torch.inf, device=device)
        cuts = torch.zeros(self._num_rows, dtype=torch.int64, device=device)
        # One at a time on a CPU, so that the weights are computed as the reference computes them.
        step = 1 if device.type == "cpu" else _RANKED_AT_ONCE
        places = self._buffer_places
        for start in range(0, len(filtered), step):
            part = filtered[start : start + step]
            indices = torch.tensor(part, device=device)
            logits = self._logits[indices].to(torch.float32)
            for i, row in enumerate(part):
                if places[row] >= 0:
                    logits[i] = self._arguments["processed_ptr"][places[row]]
            low, high, cut = filter_bounds(logits, [samplings[row] for row in part])
            bounds[indices] = torch.stack((low, high), dim=1)
            cuts[indices] = cut
        return {"bounds_ptr": bounds, "cuts_ptr": cuts, "has_bounds": bool(filtered)}

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Allocate what the kernels tell each other: by split, by row and by request."""
        device = self._logits.device
        num_rows, num_splits = self._num_rows, self._num_splits
        num_requests = len(self._requests)

        def new(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        by_split = {
            **dict.fromkeys(("tops", "sums", "draft_sums", "residuals"), torch.float32),
            **dict.fromkeys(("times", "residual_times"), torch.float32),
            **dict.fromkeys(("top_ids", "winners", "residual_winners"), torch.int32),
        }
        return {
            **{f"split_{name}_ptr": new(by_split[name], num_rows, num_splits) for name in by_split},
            "tops_ptr": new(torch.float32, num_rows),
            "top_ids_ptr": new(torch.int32, num_rows),
            "sums_ptr": new(torch.float32, num_rows),
            "bad_ptr": new(torch.int32, num_rows),
            "draft_probs_ptr": new(torch.float32, num_rows),
            "ratios_ptr": new(torch.float64, num_rows),
            "used_rules_ptr": new(torch.int64, num_requests),
            "scales_ptr": new(torch.float32, num_requests),
            "limits_ptr": new(torch.int32, num_requests),
            "outputs_ptr": new(torch.int64, num_requests, rejection.NUM_OUTPUTS.value),
        }


class _Tables:
    """The requests as tensors on the device, by row and by request."""

    def __init__(
        self, requests: Sequence[VerifyRequest], vocab_size: int, device: torch.device
    ) -> None:
        num_requests = len(requests)
        self._kept: list[torch.Tensor] = []  # alive for as long as kernels have their addresses
        self._maps: dict[int, int] = {}  # addresses of column maps, by the id of their token_ids
        self.has_wrong_probs = [False] * num_requests
        self.max_columns = 0
        rules = np.zeros(num_requests, dtype=np.int64)
        by_request = np.zeros((10, num_requests + num_requests % 2), dtype=np.int64)
        first_row = 0
        for i, request in enumerate(requests):
            sampling = request.sampling
            rules[i] = self._rule(i, request)
            seed = sampling.seed & _MASK_64
            by_request[:6, i] = (
                first_row,
                len(request.draft_token_ids),
                seed - (seed >> 63 << 64),  # the same bits, signed
                request.num_committed,
                sampling.sample_index,
                request.parents is not None,
            )
            if rules[i] >= rows.REJECTION.value:
                assert request.draft_probs is not None  # the rule is for drafts that have them
                by_request[6:, i] = self._addresses(request.draft_probs, vocab_size, device)
            first_row += request.num_rows

        num_rows = [request.num_rows for request in requests]
        indices = np.concatenate([np.arange(n) for n in num_rows])
        by_row = np.zeros((7, first_row + first_row % 2), dtype=np.int64)
        by_row[0, :first_row] = np.repeat(rules, num_rows)
        by_row[1, :first_row] = np.repeat(np.arange(num_requests), num_rows)
        by_row[2, :first_row] = indices
        by_row[3, :first_row] = list(
            chain.from_iterable((*request.draft_token_ids, 0) for request in requests)
        )
        by_row[4, :first_row] = np.argsort(indices, kind="stable")
        by_row[5, :first_row] = indices  # a row's depth
        by_row[6, :first_row] = indices - 1  # and the parent of the draft of its index
        starts = np.cumsum([0, *num_rows])
        for start, request in zip(starts.tolist(), requests, strict=False):
            if parents := request.parents:
                end = start + len(parents)
                by_row[5, start + 1 : end + 1] = draft_depths(parents)
                by_row[6, start:end] = parents
        # Greedy rows are not divided by a temperature; their scores are their logits.
        settings = np.array([(_temperature(r), r.sampling.min_p) for r in requests])
        self.floats = torch.from_numpy(
            np.repeat(settings, num_rows, axis=0).T.astype(np.float32, order="C")
        ).to(device)
        on_device = torch.from_numpy(np.concatenate((by_request.ravel(), by_row.ravel())))
        on_device = on_device.to(device)
        request_columns = on_device[: by_request.size].view(by_request.shape)
        row_columns = on_device[by_request.size :].view(by_row.shape)

        drawn = rules >= rows.REJECTION.value
        self.has_drawn = bool(drawn.any())
        self.has_blocks = bool((rules == rows.BLOCK.value).any())
        self.has_sampled = bool((rules != rows.GREEDY.value).any())
        self.has_maps = bool(self._maps)
        self.needs_min_p_sums = bool((settings[drawn, 1] > 0).any())
        self.arguments = {
            "first_rows_ptr": request_columns[0],
            "num_drafts_ptr": request_columns[1],
            "seeds_ptr": request_columns[2],
            "positions_ptr": request_columns[3],
            "samples_ptr": request_columns[4],
            "are_trees_ptr": request_columns[5],
            "probs_ptr": request_columns[6],
            "probs_strides_ptr": request_columns[7],
            "column_maps_ptr": request_columns[8],
            "num_columns_ptr": request_columns[9],
            "rules_ptr": row_columns[0],
            "requests_ptr": row_columns[1],
            "draft_indices_ptr": row_columns[2],
            "draft_tokens_ptr": row_columns[3],
            "order_ptr": row_columns[4],
            "depths_ptr": row_columns[5],
            "parents_ptr": row_columns[6],
            "temperatures_ptr": self.floats[0],
            "min_ps_ptr": self.floats[1],
        }

    def _rule(self, i: int, request: VerifyRequest) -> int:
        """Return a request's rule, as far as it can be told without looking at the draft probs."""
        rule: int = rows.DETERMINISTIC.value
        if is_greedy(request.sampling):
            rule = rows.GREEDY.value
        elif (draft_probs := drawn_from(request)) is not None:
            if not _fits(draft_probs, request):
                self.has_wrong_probs[i] = True
            elif draft_probs.rule == "block":
                rule = rows.BLOCK.value
            else:
                rule = rows.REJECTION.value
        return rule

    def _addresses(
        self, draft_probs: DraftProbs, vocab_size: int, device: torch.device
    ) -> tuple[int, int, int, int]:
        """Return where the probs are, the bytes between rows, where the map is, the columns."""
        probs = draft_probs.probs.to(device, torch.float32)
        if probs.stride(1) != 1:
            probs = probs.contiguous()
        self._kept.append(probs)
        num_columns = probs.shape[1]
        self.max_columns = max(self.max_columns, num_columns)
        token_ids, address = draft_probs.token_ids, 0
        if token_ids is not None:
            if id(token_ids) not in self._maps:
                column_map = _column_map(token_ids.to(device), vocab_size)
                self._kept += [token_ids, column_map]
                self._maps[id(token_ids)] = column_map.data_ptr()
            address = self._maps[id(token_ids)]
        return probs.data_ptr(), probs.stride(0) * probs.element_size(), address, num_columns


def _fits(draft_probs: DraftProbs, request: VerifyRequest) -> bool:
    """Whether the probs are of this committed length and draft; see `drawn_drafts.are_usable`."""
    probs, columns = draft_probs.probs, draft_probs.token_ids
    return (
        draft_probs.num_tokens == request.num_committed
        and probs.ndim == 2
        and probs.shape[0] == len(request.draft_token_ids)
        and probs.shape[1] > 0
        and (columns is None or columns.shape == probs.shape[1:])
    )


def _column_map(token_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return the column of each target id, -1 where there is none: [vocab_size + 1] int32."""
    columns = torch.arange(token_ids.shape[0], dtype=torch.int32, device=token_ids.device)
    places = columns.new_full((vocab_size + 1,), -1)
    is_known = (token_ids >= 0) & (token_ids < vocab_size)
    # Ids that the target lacks go to the place past its vocabulary, which nobody reads.
    return places.scatter_(0, torch.where(is_known, token_ids, vocab_size), columns)


def _temperature(request: VerifyRequest) -> float:
    return 1.0 if is_greedy(request.sampling) else request.sampling.temperature


def _reason(row: Row) -> str:
    """Say why no token may be taken from a row, in the reference's words."""
    try:
        if is_greedy(row.sampling):
            top, top_id = row.logits.max(dim=-1)
            greedy_token(row, top.item(), int(top_id))
        else:
            target_probs(row)
    except RowError as error:
        return str(error)
    return "the target model's logits over the temperature exceed float32"
