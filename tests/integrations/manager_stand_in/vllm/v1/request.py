from enum import Enum, auto


class RequestStatus(Enum):
    WAITING = auto()
    PREEMPTED = auto()
    RUNNING = auto()
