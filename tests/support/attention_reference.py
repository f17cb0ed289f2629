"""Reference of paged attention: in float32, one token at a time."""

from __future__ import annotations

import torch
from llmopt.engine.kernels.attention.batch import AttentionRule, SequenceSpan
from llmopt.engine.kernels.attention.paged_attention import AttentionCall, attention_kernel


@attention_kernel
def attend_reference(call: AttentionCall) -> torch.Tensor:
    """Reference implementation, in float32, one token at a time. For tests."""
    queries, keys, values, batch, rule, sink_queries = call
    out = call.empty_result()
    sink_queries = queries if sink_queries is None else sink_queries
    spans = list(batch.spans)
    if (group := batch.decode) is not None:
        table = group.block_ids.view(group.rows.numel(), -1)
        for i, row in enumerate(group.rows.tolist()):
            length, evicted_span = int(group.lengths[i]), int(group.evicted_spans[i])
            spans.append(
                SequenceSpan(row, row + 1, length, table[i], group.sink_length, evicted_span)
            )
    for span in spans:
        k = keys.read(span.block_ids, torch.float32).flatten(0, 1)
        v = values.read(span.block_ids, torch.float32).flatten(0, 1)
        positions, ancestors = _positions(span)
        for row in range(span.begin, span.end):
            number = span.num_cached - (span.end - row)
            query_position = positions[number]
            scores, slots = [], []
            for other in range(_num_visible(number, span, rule)):
                position = positions[other]
                is_first = position < rule.num_sink_tokens
                if not is_first and not _is_visible(query_position, position, rule):
                    continue
                if other not in ancestors.get(number, range(len(positions))):
                    continue
                slot = other if other < span.sink_length else other - span.evicted_span
                query = (sink_queries if is_first else queries)[row].float()
                grouped = query.view(keys.num_heads, -1, query.shape[-1])
                scores.append(torch.einsum("hgd,hd->hg", grouped, k[slot]) * rule.scale)
                slots.append(slot)
            logits = torch.stack(scores, dim=-1)
            if rule.softcap is not None:
                logits = rule.softcap * (logits / rule.softcap).tanh()
            if rule.sinks is not None:
                column = rule.sinks.float().view(keys.num_heads, -1, 1)
                logits = torch.cat([logits, column], dim=-1)
            weights = logits.softmax(dim=-1)[..., : len(slots)]
            mixed = torch.einsum("hgt,thd->hgd", weights, v[slots])
            out[row] = mixed.flatten(0, 1).to(out.dtype)
    return out


def _positions(span: SequenceSpan) -> tuple[list[int], dict[int, set[int]]]:
    """Positions of a sequence's tokens so far, and what each draft token of a tree attends to, by index."""
    if span.tree is None:
        return list(range(span.num_cached)), {}
    depths = span.tree.depths.tolist()
    first = span.num_cached - len(depths)
    ancestors = {
        first + index: {*range(first), *(first + other for other, sees in enumerate(row) if sees)}
        for index, row in enumerate(span.tree.ancestors.tolist())
    }
    return [*range(first), *(first - 1 + depth for depth in depths)], ancestors


def _num_visible(number: int, span: SequenceSpan, rule: AttentionRule) -> int:
    """Tokens of a sequence up to the last one that token `number` may attend to."""
    image = next((image for image in span.images if number in image), None)
    return number + 1 if image is None or not rule.bidirectional else image.stop


def _is_visible(query_position: int, position: int, rule: AttentionRule) -> bool:
    """Whether the query at `query_position` attends to an earlier `position`, sink tokens aside."""
    if rule.window is not None and query_position - position >= rule.window:
        return False
    return rule.chunk is None or query_position // rule.chunk == position // rule.chunk
