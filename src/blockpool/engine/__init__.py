"""One step at a time: the scheduler says who runs, the worker turns that into slots, clears and copies.

The engine drives the cache; it knows no model but its reference one, no network and no clock.
"""

from blockpool.engine.block_table import BlockTable
from blockpool.engine.checked_store import CheckedStore
from blockpool.engine.connector import Connector, Transfers
from blockpool.engine.engine import Engine
from blockpool.engine.errors import EngineConfigError, EngineError, EngineRequestError, ResultError
from blockpool.engine.fingerprint import Fingerprints
from blockpool.engine.model import Model, RequestStep, StateBlocks
from blockpool.engine.output import CachedRequestData, LoadData, NewRequestData, SchedulerOutput
from blockpool.engine.paged_store import PagedStore
from blockpool.engine.reads import tokens_read
from blockpool.engine.reference_model import ReferenceModel
from blockpool.engine.request import EngineRequest
from blockpool.engine.scheduler import Scheduler
from blockpool.engine.shadow_model import ShadowModel
from blockpool.engine.shadow_store import Operation, ShadowError, ShadowStore
from blockpool.engine.slots import ring_slots, slot_mapping, slots_of
from blockpool.engine.states import FinishedRequest, FinishReason, RequestState
from blockpool.engine.store import Access, Store, StoreError
from blockpool.engine.worker import Worker, WorkerError

__all__ = [
    "Access",
    "BlockTable",
    "CachedRequestData",
    "CheckedStore",
    "Connector",
    "Engine",
    "EngineConfigError",
    "EngineError",
    "EngineRequest",
    "EngineRequestError",
    "Fingerprints",
    "FinishReason",
    "FinishedRequest",
    "LoadData",
    "Model",
    "NewRequestData",
    "Operation",
    "PagedStore",
    "ReferenceModel",
    "RequestState",
    "RequestStep",
    "ResultError",
    "Scheduler",
    "SchedulerOutput",
    "ShadowError",
    "ShadowModel",
    "ShadowStore",
    "StateBlocks",
    "Store",
    "StoreError",
    "Transfers",
    "Worker",
    "WorkerError",
    "ring_slots",
    "slot_mapping",
    "slots_of",
    "tokens_read",
]
