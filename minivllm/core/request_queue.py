"""The order in which waiting requests are looked at: first come, first served, or by priority.

Mirrors `vllm/v1/core/sched/request_queue.py` (vLLM 0.32.0). Both queues have the same methods; iterating one gives
the requests in the order in which they would be popped.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minivllm.config import SchedulerPolicy
    from minivllm.request import Request


class FCFSRequestQueue:
    """First come, first served.

    Mirrors: vllm/v1/core/sched/request_queue.py FCFSRequestQueue.
    """

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def add_request(self, request: Request) -> None:
        """Queue a request that just arrived."""
        self._requests.append(request)

    def prepend_request(self, request: Request) -> None:
        """Queue a request that was out already: it goes first."""
        self._requests.appendleft(request)

    def peek_request(self) -> Request:
        """The next request; it stays queued."""
        return self._requests[0]

    def pop_request(self) -> Request:
        """The next request, taken out."""
        return self._requests.popleft()

    def remove_requests(self, requests: Collection[Request]) -> None:
        """Take out `requests` wherever they stand; those not queued are ignored."""
        self._requests = deque(request for request in self._requests if request not in requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)


class PriorityRequestQueue:
    """Lowest (priority, arrival time) first; the request id settles the rest, so that order never depends on chance.

    Mirrors: vllm/v1/core/sched/request_queue.py PriorityRequestQueue.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, float, str, Request]] = []

    def add_request(self, request: Request) -> None:
        """Queue a request that just arrived."""
        heapq.heappush(self._heap, (request.priority, request.arrival_time, request.request_id, request))

    def prepend_request(self, request: Request) -> None:
        """Queue a request that was out already: its priority alone decides its place."""
        self.add_request(request)

    def peek_request(self) -> Request:
        """The next request; it stays queued."""
        return self._heap[0][-1]

    def pop_request(self) -> Request:
        """The next request, taken out."""
        return heapq.heappop(self._heap)[-1]

    def remove_requests(self, requests: Collection[Request]) -> None:
        """Take out `requests` wherever they stand; those not queued are ignored."""
        self._heap = [entry for entry in self._heap if entry[-1] not in requests]
        heapq.heapify(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return (entry[-1] for entry in sorted(self._heap))

    def __len__(self) -> int:
        return len(self._heap)


RequestQueue = FCFSRequestQueue | PriorityRequestQueue


def create_request_queue(policy: SchedulerPolicy) -> RequestQueue:
    """The queue for a scheduling policy."""
    return PriorityRequestQueue() if policy == "priority" else FCFSRequestQueue()
