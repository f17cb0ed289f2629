"""Scheduling policies: first come first served, priority, shortest prefill. Each assigns a rank.

The sequence of the smallest rank is admitted first and preempted last. The rank is assigned once, when a
sequence is added, so that a preempted one keeps its place in the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...quant.base.errors import BadInput
from .request import Rank, Request

TOKENS_PER_PLACE = 16
"""Under shortest-prefill, prompt tokens that weigh as much as one place in the order of arrival."""


def first_come(request: Request) -> Rank:
    """In the order of arrival, without starvation."""
    return (0, request.order)


def by_priority(request: Request) -> Rank:
    """A smaller `priority` first, in the order of arrival among equals.

    A request of a large value starves while others arrive, as the caller asked for.
    """
    return (request.priority, request.order)


def shortest_prefill(request: Request) -> Rank:
    """Short prompts first, which lowers the mean time to the first token.

    Every place in the order of arrival counts as `TOKENS_PER_PLACE` prompt tokens. So a prompt of P tokens
    is overtaken by at most P / TOKENS_PER_PLACE of the sequences that come after it, however many they are.
    """
    return (request.num_prompt_tokens + TOKENS_PER_PLACE * request.order, request.order)


POLICIES: Mapping[str, Callable[[Request], Rank]] = {
    "fcfs": first_come,
    "priority": by_priority,
    "shortest-prefill": shortest_prefill,
}


def rank_of(request: Request, policy: str) -> Rank:
    """The rank of a sequence under the policy of that name.

    Raises:
        BadInput: it has a priority, which the policy ignores.
    """
    if request.priority and policy != "priority":
        raise BadInput(
            f"priority = {request.priority}: the scheduling policy is {policy}, which does not look at "
            "it; start the engine with the policy priority"
        )
    return POLICIES[policy](request)
