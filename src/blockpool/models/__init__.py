"""What a model keeps of its tokens: from a Hugging Face `config.json` to groups, bytes and blocks in memory.

Knows layers, bytes and kinds of attention. It must not know requests, pools or traffic.
"""

from .architectures import known_architectures, read_model
from .catalogue import known_models
from .dtypes import KV_CACHE_DTYPES
from .errors import ModelError, UnknownArchitecture, UnknownModel
from .find import ModelSource, find_model
from .groups_text import groups_as_text, parse_groups
from .layers import LayerCache, ModelCache
from .layout import CacheLayout, GroupLayout, lay_out

__all__ = [
    "KV_CACHE_DTYPES",
    "CacheLayout",
    "GroupLayout",
    "LayerCache",
    "ModelCache",
    "ModelError",
    "ModelSource",
    "UnknownArchitecture",
    "UnknownModel",
    "find_model",
    "groups_as_text",
    "known_architectures",
    "known_models",
    "lay_out",
    "parse_groups",
    "read_model",
]
