import hashlib
import pickle

import cbor2


def sha256(value):
    return hashlib.sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()


def sha256_cbor(value):
    return hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()


def xxhash(value):
    import xxhash

    return xxhash.xxh3_128_digest(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))


def xxhash_cbor(value):
    import xxhash

    return xxhash.xxh3_128_digest(cbor2.dumps(value, canonical=True))


def get_hash_fn_by_name(name):
    return {"sha256": sha256, "sha256_cbor": sha256_cbor, "xxhash": xxhash, "xxhash_cbor": xxhash_cbor}[name]
