/* The hash chain of a token sequence: SHA-256 over the canonical CBOR or the pickle of (parent, tokens, extra), block
 * after block. One call hashes a whole prompt.
 *
 * CBOR (RFC 8949) of a block: 83 | 58 20 parent[32] | array header | token ids, shortest form | extra (f6 = none).
 *
 * Pickle (protocol 5; Lib/pickletools.py describes the opcodes) of a block, what is in [] only from four tokens on:
 * 80 05 | 95 and how many bytes follow, as 8 bytes, little endian | 43 20 parent[32] 94 | [28] token ids, shortest
 * form | 74 (85, 86, 87 for one, two, three tokens) 94 | extra (4e = none) | 87 94 | 2e.
 * 94 gives the value before it the next number, from 0 on, by which a later value can refer to it. Two things are
 * left to pickle itself, and the chain then ends with nothing: a block that it might cut in two frames, and one whose
 * extra value holds bytes equal to the parent, to which it would refer.
 *
 * The bytes are written straight into the padded SHA-256 message (FIPS 180-4), so nothing is built in between.
 *
 * Two things decide the speed:
 * - the chain is serial and bound by the latency of the SHA instructions, so the next block is encoded *before*
 *   the current one is compressed: its stores have left the store buffer by the time they are loaded again;
 * - the width of a token's encoding is random, so it is chosen without a branch.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

#if (defined(__x86_64__) || defined(__i386__)) && defined(__GNUC__)
#define HAVE_X86 1
#include <cpuid.h>
#include <immintrin.h>
#else
#define HAVE_X86 0
#endif

#if defined(__GNUC__) && defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define FAST_STORES 1
#else
#define FAST_STORES 0
#endif

enum {
    DIGEST_SIZE = 32,
    CBOR_PARENT_AT = 3,           /* after 83 58 20 */
    PICKLE_PARENT_AT = 13,        /* after 80 05, 95 and a length, 43 20 */
    FRAME_SIZE_AT = 3,
    FRAME_AT = 11,                /* where the bytes begin that the frame's size counts */
    FRAME_LIMIT = 1 << 16,        /* pickle never ends a frame that is shorter */
    MAX_HEADER = 9,               /* of a CBOR array with up to 2**64 - 1 items */
    MAX_TOKEN = 7,                /* pickled: opcode, length, 32 bits and a zero byte, because integers are signed */
    MAX_ENDING = 5,               /* pickled: what stands around the extra value */
    STORE_SLACK = 8,              /* a token is written as one 8-byte store */
};

enum { CBOR_NONE = 0xf6 };

/* What the opcodes of pickle are called in Lib/pickletools.py. */
enum {
    MARK = 0x28,
    STOP = 0x2e,
    SHORT_BINBYTES = 0x43,
    BININT = 0x4a,
    BININT1 = 0x4b,
    BININT2 = 0x4d,
    NONE = 0x4e,
    TUPLE = 0x74,
    PROTO = 0x80,
    TUPLE1 = 0x85, /* and TUPLE2, TUPLE3 after it */
    TUPLE3 = 0x87,
    LONG1 = 0x8a,
    MEMOIZE = 0x94,
    FRAME = 0x95,
};

/* From here on releasing the interpreter lock costs less than holding it would cost the other threads. */
static const Py_ssize_t RELEASE_LOCK_FROM = 4096;

/* ------------------------------------------------------------------------------------ SHA-256 (FIPS 180-4) */

static const uint32_t K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static const uint32_t INITIAL[8] = {
    0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
};

/* Hashes a padded message of num_chunks * 64 bytes whose 32 bytes from `parent_at` on are to be `parent`.
 * It may write the parent there, or leave the zeros it finds. */
typedef void (*finish_fn)(uint8_t *message, size_t num_chunks, size_t parent_at, const uint8_t *parent,
                          uint8_t *digest);

static inline uint32_t load_be32(const uint8_t *p) {
    return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

static inline void store_be32(uint8_t *p, uint32_t x) {
    p[0] = (uint8_t)(x >> 24);
    p[1] = (uint8_t)(x >> 16);
    p[2] = (uint8_t)(x >> 8);
    p[3] = (uint8_t)x;
}

static inline uint32_t rotr(uint32_t x, int n) { return x >> n | x << (32 - n); }

/* One round. `bc` is b ^ c, and leaves as the next round's b ^ c, which saves an operation in the majority. */
#define ROUND(a, b, c, d, e, f, g, h, t, word)                                                              \
    do {                                                                                                    \
        uint32_t t1 = h + (rotr(e, 6) ^ rotr(e, 11) ^ rotr(e, 25)) + (g ^ (e & (f ^ g))) + K[t] + (word);   \
        uint32_t ab = a ^ b;                                                                                \
        d += t1;                                                                                            \
        h = t1 + (rotr(a, 2) ^ rotr(a, 13) ^ rotr(a, 22)) + (b ^ (ab & bc));                                \
        bc = ab;                                                                                            \
    } while (0)

/* Eight rounds, after which the variables have their names again; WORD(j) is the word of round t + j. */
#define EIGHT(t, j, WORD)                                                                                   \
    do {                                                                                                    \
        ROUND(a, b, c, d, e, f, g, h, (t) + (j), WORD(j));                                                  \
        ROUND(h, a, b, c, d, e, f, g, (t) + (j) + 1, WORD((j) + 1));                                        \
        ROUND(g, h, a, b, c, d, e, f, (t) + (j) + 2, WORD((j) + 2));                                        \
        ROUND(f, g, h, a, b, c, d, e, (t) + (j) + 3, WORD((j) + 3));                                        \
        ROUND(e, f, g, h, a, b, c, d, (t) + (j) + 4, WORD((j) + 4));                                        \
        ROUND(d, e, f, g, h, a, b, c, (t) + (j) + 5, WORD((j) + 5));                                        \
        ROUND(c, d, e, f, g, h, a, b, (t) + (j) + 6, WORD((j) + 6));                                        \
        ROUND(b, c, d, e, f, g, h, a, (t) + (j) + 7, WORD((j) + 7));                                        \
    } while (0)

/* The schedule is a ring of 16 words: read from the message in the first rounds, then each replaced when due. */
#define READ_WORD(j) (w[j] = load_be32(chunk + 4 * (j)))
#define NEXT_WORD(j) (w[j] += sigma0(w[((j) + 1) & 15]) + w[((j) + 9) & 15] + sigma1(w[((j) + 14) & 15]))

static inline uint32_t sigma0(uint32_t x) { return rotr(x, 7) ^ rotr(x, 18) ^ x >> 3; }
static inline uint32_t sigma1(uint32_t x) { return rotr(x, 17) ^ rotr(x, 19) ^ x >> 10; }

static void compress_portable(uint32_t state[8], const uint8_t *chunk) {
    uint32_t w[16];
    uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
    uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
    uint32_t bc = b ^ c;

    EIGHT(0, 0, READ_WORD);
    EIGHT(0, 8, READ_WORD);
    for (int t = 16; t < 64; t += 16) {
        EIGHT(t, 0, NEXT_WORD);
        EIGHT(t, 8, NEXT_WORD);
    }
    state[0] += a, state[1] += b, state[2] += c, state[3] += d;
    state[4] += e, state[5] += f, state[6] += g, state[7] += h;
}

static void finish_portable(uint8_t *message, size_t num_chunks, size_t parent_at, const uint8_t *parent,
                            uint8_t *digest) {
    uint32_t state[8];

    memcpy(state, INITIAL, sizeof state);
    memcpy(message + parent_at, parent, DIGEST_SIZE);
    for (size_t i = 0; i < num_chunks; i++)
        compress_portable(state, message + 64 * i);
    for (int i = 0; i < 8; i++)
        store_be32(digest + 4 * i, state[i]);
}

#if HAVE_X86

#define SHA_NI __attribute__((target("sha,sse4.1")))

/* Four rounds. The instruction keeps the state as (A,B,E,F) and (C,D,G,H), does two rounds with the low half of
 * its constant operand, and after two rounds the old ABEF is the new CDGH. */
#define FOUR_ROUNDS(t, words)                                                                               \
    do {                                                                                                    \
        __m128i wk = _mm_add_epi32(words, _mm_loadu_si128((const __m128i *)(K + (t))));                     \
        cdgh = _mm_sha256rnds2_epu32(cdgh, abef, wk);                                                       \
        abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(wk, 0x0e));                              \
    } while (0)

/* The four words that follow w0..w3 in the message schedule. */
#define NEXT_WORDS(w0, w1, w2, w3)                                                                          \
    _mm_sha256msg2_epu32(_mm_add_epi32(_mm_sha256msg1_epu32(w0, w1), _mm_alignr_epi8(w3, w2, 4)), w3)

#define SIXTEEN_ROUNDS(t)                                                                                   \
    do {                                                                                                    \
        w0 = NEXT_WORDS(w0, w1, w2, w3);                                                                    \
        FOUR_ROUNDS(t, w0);                                                                                 \
        w1 = NEXT_WORDS(w1, w2, w3, w0);                                                                    \
        FOUR_ROUNDS((t) + 4, w1);                                                                           \
        w2 = NEXT_WORDS(w2, w3, w0, w1);                                                                    \
        FOUR_ROUNDS((t) + 8, w2);                                                                           \
        w3 = NEXT_WORDS(w3, w0, w1, w2);                                                                    \
        FOUR_ROUNDS((t) + 12, w3);                                                                          \
    } while (0)

/* The 16-byte words of the first chunk, in which the parent begins at byte `at` of the first, and nowhere else. */
#define PUT_PARENT(at)                                                                                      \
    do {                                                                                                    \
        w0 = _mm_or_si128(w0, _mm_slli_si128(low, at));                                                     \
        w1 = _mm_alignr_epi8(high, low, 16 - (at));                                                         \
        w2 = _mm_or_si128(w2, _mm_srli_si128(high, 16 - (at)));                                             \
    } while (0)

/* The parent goes from registers into the first chunk: stored into the message it would be loaded again across
 * the borders of the stores, which stalls. */
SHA_NI static void finish_sha_ni(uint8_t *message, size_t num_chunks, size_t parent_at, const uint8_t *parent,
                                 uint8_t *digest) {
    const __m128i big_endian = _mm_set_epi8(12, 13, 14, 15, 8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3);
    const __m128i reverse = _mm_set_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m128i *chunk = (const __m128i *)message;
    __m128i low = _mm_loadu_si128((const __m128i *)parent);
    __m128i high = _mm_loadu_si128((const __m128i *)(parent + 16));
    __m128i w0 = _mm_loadu_si128(chunk), w1;
    __m128i w2 = _mm_loadu_si128(chunk + 2);
    __m128i w3 = _mm_loadu_si128(chunk + 3);
    __m128i abef = _mm_set_epi32((int)INITIAL[0], (int)INITIAL[1], (int)INITIAL[4], (int)INITIAL[5]);
    __m128i cdgh = _mm_set_epi32((int)INITIAL[2], (int)INITIAL[3], (int)INITIAL[6], (int)INITIAL[7]);

    if (parent_at == CBOR_PARENT_AT)
        PUT_PARENT(CBOR_PARENT_AT);
    else
        PUT_PARENT(PICKLE_PARENT_AT);
    for (;;) {
        __m128i abef_before = abef, cdgh_before = cdgh;

        w0 = _mm_shuffle_epi8(w0, big_endian);
        w1 = _mm_shuffle_epi8(w1, big_endian);
        w2 = _mm_shuffle_epi8(w2, big_endian);
        w3 = _mm_shuffle_epi8(w3, big_endian);
        FOUR_ROUNDS(0, w0);
        FOUR_ROUNDS(4, w1);
        FOUR_ROUNDS(8, w2);
        FOUR_ROUNDS(12, w3);
        SIXTEEN_ROUNDS(16);
        SIXTEEN_ROUNDS(32);
        SIXTEEN_ROUNDS(48);
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
        if (--num_chunks == 0)
            break;
        chunk += 4;
        w0 = _mm_loadu_si128(chunk);
        w1 = _mm_loadu_si128(chunk + 1);
        w2 = _mm_loadu_si128(chunk + 2);
        w3 = _mm_loadu_si128(chunk + 3);
    }
    _mm_storeu_si128((__m128i *)digest, _mm_shuffle_epi8(_mm_unpackhi_epi64(cdgh, abef), reverse));
    _mm_storeu_si128((__m128i *)(digest + 16), _mm_shuffle_epi8(_mm_unpacklo_epi64(cdgh, abef), reverse));
}

/* Asked of the processor itself: one compiler's __builtin_cpu_supports("sha") was wrong on a machine that has it. */
static finish_fn fastest_finish(void) {
    unsigned a, b, c, d;

    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & 1u << 29))
        return finish_portable;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & 1u << 9) || !(c & 1u << 19)) /* SSSE3 and SSE4.1 */
        return finish_portable;
    return finish_sha_ni;
}

#else

static finish_fn fastest_finish(void) { return finish_portable; }

#endif

/* ---------------------------------------------------------------------------------------------------- CBOR */

/* Writes an unsigned integer below 2**32 in shortest form; up to STORE_SLACK bytes from `out` are clobbered. */
static inline uint8_t *put_cbor(uint8_t *out, uint32_t id) {
#if FAST_STORES
    static const uint8_t shift[4] = {0, 24, 16, 0}; /* of the byte-swapped id, to leave the bytes that are written */
    static const uint8_t length[4] = {1, 2, 3, 5};
    unsigned width = (id > 23) + (id > 0xff) + (id > 0xffff);
    uint64_t head = width ? 0x17u + width : id;
    uint64_t word = head | (uint64_t)(__builtin_bswap32(id) >> shift[width]) << 8;

    memcpy(out, &word, sizeof word);
    return out + length[width];
#else
    if (id <= 23) {
        *out++ = (uint8_t)id;
    } else if (id <= 0xff) {
        *out++ = 0x18;
        *out++ = (uint8_t)id;
    } else if (id <= 0xffff) {
        *out++ = 0x19;
        *out++ = (uint8_t)(id >> 8);
        *out++ = (uint8_t)id;
    } else {
        *out++ = 0x1a;
        store_be32(out, id);
        out += 4;
    }
    return out;
#endif
}

static size_t put_array_header(uint8_t *out, uint64_t count) {
    int num_bytes = count <= 23 ? 0 : count <= 0xff ? 1 : count <= 0xffff ? 2 : count <= 0xffffffff ? 4 : 8;

    out[0] = (uint8_t)(0x80 | (num_bytes == 0   ? count
                               : num_bytes == 1 ? 24
                               : num_bytes == 2 ? 25
                               : num_bytes == 4 ? 26
                                                : 27));
    for (int i = 0; i < num_bytes; i++)
        out[1 + i] = (uint8_t)(count >> 8 * (num_bytes - 1 - i));
    return 1 + (size_t)num_bytes;
}

/* -------------------------------------------------------------------------------------------------- pickle */

/* The same for pickle: opcode and value, little endian. */
static inline uint8_t *put_pickle(uint8_t *out, uint32_t id) {
#if FAST_STORES
    static const uint16_t opcode[4] = {BININT1, BININT2, BININT, LONG1 | 5 << 8};
    static const uint8_t shift[4] = {8, 8, 8, 16};
    static const uint8_t length[4] = {2, 3, 5, 7};
    unsigned width = (id > 0xff) + (id > 0xffff) + (id > 0x7fffffff);
    uint64_t word = opcode[width] | (uint64_t)id << shift[width];

    memcpy(out, &word, sizeof word);
    return out + length[width];
#else
    int num_bytes = id <= 0xff ? 1 : id <= 0xffff ? 2 : id <= 0x7fffffff ? 4 : 5;

    if (num_bytes == 5)
        *out++ = LONG1;
    *out++ = num_bytes == 1 ? BININT1 : num_bytes == 2 ? BININT2 : num_bytes == 4 ? BININT : 5;
    for (int i = 0; i < num_bytes; i++)
        *out++ = (uint8_t)((uint64_t)id >> 8 * i);
    return out;
#endif
}

/* Whether `parent` occurs in the bytes of an extra value. */
static int holds_parent(PyObject *extra, const uint8_t *parent) {
    const uint8_t *at = (const uint8_t *)PyBytes_AS_STRING(extra);
    const uint8_t *end = at + PyBytes_GET_SIZE(extra); /* of where it may begin */

    if (PyBytes_GET_SIZE(extra) < DIGEST_SIZE)
        return 0;
    for (end -= DIGEST_SIZE - 1; at < end && (at = memchr(at, parent[0], (size_t)(end - at))); at++)
        if (!memcmp(at, parent, DIGEST_SIZE))
            return 1;
    return 0;
}

/* ------------------------------------------------------------------------------------------- token containers */

/* Writes tokens [first, first + count); returns the end, or NULL with the position of the first bad one. */
typedef uint8_t *(*put_tokens_fn)(const void *tokens, Py_ssize_t first, Py_ssize_t count, uint8_t *out,
                                  Py_ssize_t *bad);

/* The id of a plain Python int, or -1. Runs no Python code, so the container cannot change under the loop. Bools
 * are refused for good; other objects with an __index__ are converted by the caller, who then tries again. */
static inline int64_t token_of(PyObject *item) {
    int overflow;
    long long id;

    if (!PyLong_CheckExact(item))
        return -1;
#if PY_VERSION_HEX >= 0x030c0000
    if (PyUnstable_Long_IsCompact((const PyLongObject *)item)) {
        id = PyUnstable_Long_CompactValue((const PyLongObject *)item);
        return id > 0xffffffff ? -1 : id;
    }
#else
    if (Py_SIZE(item) == 1) /* one digit, of 30 bits at most */
        return ((const PyLongObject *)item)->ob_digit[0];
#endif
    id = PyLong_AsLongLongAndOverflow(item, &overflow); /* cannot fail on an int */
    return overflow || id > 0xffffffff ? -1 : id;
}

/* Ids are fetched with memcpy because an array may be contiguous and yet unaligned. */
#define PUT_ARRAY(name, put, type, is_token)                                                                \
    static uint8_t *name(const void *tokens, Py_ssize_t first, Py_ssize_t count, uint8_t *out,              \
                         Py_ssize_t *bad) {                                                                 \
        const char *at = (const char *)tokens + first * (Py_ssize_t)sizeof(type);                           \
        for (Py_ssize_t i = 0; i < count; i++) {                                                            \
            type id;                                                                                        \
            memcpy(&id, at + i * (Py_ssize_t)sizeof id, sizeof id);                                         \
            if (!(is_token)) {                                                                              \
                *bad = first + i;                                                                           \
                return NULL;                                                                                \
            }                                                                                               \
            out = put(out, (uint32_t)id);                                                                   \
        }                                                                                                   \
        return out;                                                                                         \
    }

#define PUT_OBJECTS(name, put)                                                                              \
    static uint8_t *name(const void *tokens, Py_ssize_t first, Py_ssize_t count, uint8_t *out,              \
                         Py_ssize_t *bad) {                                                                 \
        PyObject *const *items = (PyObject *const *)tokens + first;                                         \
        for (Py_ssize_t i = 0; i < count; i++) {                                                            \
            int64_t id = token_of(items[i]);                                                                \
            if (id < 0) {                                                                                   \
                *bad = first + i;                                                                           \
                return NULL;                                                                                \
            }                                                                                               \
            out = put(out, (uint32_t)id);                                                                   \
        }                                                                                                   \
        return out;                                                                                         \
    }

#define PUT_TOKENS(put)                                                                                     \
    PUT_OBJECTS(put##_objects, put)                                                                         \
    PUT_ARRAY(put##_int32, put, int32_t, id >= 0)                                                           \
    PUT_ARRAY(put##_uint32, put, uint32_t, 1)                                                               \
    PUT_ARRAY(put##_int64, put, int64_t, id >= 0 && id <= 0xffffffff)

PUT_TOKENS(put_cbor)
PUT_TOKENS(put_pickle)

/* What the items are. */
typedef enum { OBJECTS, INT32, UINT32, INT64, UNKNOWN } Kind;
static const Py_ssize_t SIZE_OF[UNKNOWN] = {sizeof(PyObject *), 4, 4, 8};

typedef struct {
    const void *items; /* from the first one that is to be read */
    Py_ssize_t first;  /* its position in what was given */
    Py_ssize_t count;
    Kind kind;
    PyObject *held;    /* a list or tuple, or NULL */
    Py_buffer view;    /* else this */
} Tokens;

static Kind kind_of(const Py_buffer *view) {
    const char *format = view->format ? view->format : "B";

    if (*format == '@' || *format == '=')
        format++;
    if (view->ndim != 1 || *format == 0 || format[1] != 0)
        return UNKNOWN;
    if (strchr("ilq", *format))
        return view->itemsize == 4 ? INT32 : view->itemsize == 8 ? INT64 : UNKNOWN;
    if (strchr("IL", *format))
        return view->itemsize == 4 ? UINT32 : UNKNOWN;
    return UNKNOWN;
}

/* How many of `size` tokens are to be read: up to `most` from `first` on; -1 if there is no such place. */
static Py_ssize_t num_read(Py_ssize_t size, Py_ssize_t first, Py_ssize_t most) {
    return first < 0 || first > size ? -1 : size - first < most ? size - first : most;
}

/* Opens up to `most` tokens from position `first` on. A list must not be changed until they are closed: in between,
 * nothing may run that could run Python code. */
static int open_tokens(PyObject *object, Py_ssize_t first, Py_ssize_t most, Tokens *tokens) {
    memset(tokens, 0, sizeof *tokens);
    if (PyList_Check(object) || PyTuple_Check(object)) {
        tokens->count = num_read(PySequence_Fast_GET_SIZE(object), first, most);
        tokens->held = Py_NewRef(object);
#ifdef Py_GIL_DISABLED
        /* another thread may change a list at any time; a tuple keeps its items alive */
        if (PyList_Check(object) && tokens->count >= 0) {
            Py_SETREF(tokens->held, PyList_GetSlice(object, first, first + tokens->count));
            if (!tokens->held)
                return -1;
            tokens->count = PyList_GET_SIZE(tokens->held);
            tokens->items = PySequence_Fast_ITEMS(tokens->held);
            tokens->first = first;
            return 0;
        }
#endif
        tokens->items = PySequence_Fast_ITEMS(object);
    } else {
        if (PyObject_GetBuffer(object, &tokens->view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) < 0)
            return -1;
        tokens->kind = kind_of(&tokens->view);
        if (tokens->kind == UNKNOWN) {
            PyErr_Format(PyExc_TypeError,
                         "token ids: a list, a tuple or a one-dimensional native int32, int64 or uint32 buffer, "
                         "not format '%s' with %d dimensions",
                         tokens->view.format ? tokens->view.format : "B", tokens->view.ndim);
            PyBuffer_Release(&tokens->view);
            return -1;
        }
        tokens->count = num_read(tokens->view.len / tokens->view.itemsize, first, most);
        tokens->items = tokens->view.buf;
    }
    if (tokens->count > 0) {
        tokens->items = (const char *)tokens->items + first * SIZE_OF[tokens->kind];
        tokens->first = first;
    }
    return 0;
}

static void close_tokens(Tokens *tokens) {
    if (tokens->held)
        Py_CLEAR(tokens->held);
    else
        PyBuffer_Release(&tokens->view);
}

/* ------------------------------------------------------------------------------------------------- the chain */

/* What differs between the two serialisations. */
typedef struct {
    size_t parent_at;
    uint8_t start[PICKLE_PARENT_AT]; /* what precedes the parent */
    put_tokens_fn put[UNKNOWN];
} Form;

static const Form CBOR = {
    CBOR_PARENT_AT,
    {0x83, 0x58, DIGEST_SIZE},
    {put_cbor_objects, put_cbor_int32, put_cbor_uint32, put_cbor_int64},
};
static const Form PICKLE = {
    PICKLE_PARENT_AT,
    {PROTO, 5, FRAME, 0, 0, 0, 0, 0, 0, 0, 0, SHORT_BINBYTES, DIGEST_SIZE},
    {put_pickle_objects, put_pickle_int32, put_pickle_uint32, put_pickle_int64},
};

/* How a chain can end, unless it is the position of a bad token. */
enum { DONE = -1, LEFT_TO_PICKLE = -2 };

typedef struct {
    const Form *form;
    const Tokens *tokens;
    put_tokens_fn put;
    Py_ssize_t block_size;
    Py_ssize_t num_blocks;
    PyObject *const *extras; /* one None or bytes per block, or NULL */
    const uint8_t *parent;
    finish_fn finish;
    uint8_t *digests;     /* num_blocks * DIGEST_SIZE */
    uint8_t *messages[2]; /* the one being compressed, and the next one being written */
    size_t tokens_at;     /* where in a message the first token stands */
    uint8_t tuple;        /* pickled: the opcode that makes a tuple of the tokens */
} Chain;

/* Writes block i into a message, padded; returns its number of 64-byte chunks, or 0 and why the chain ends. */
static size_t write_message(const Chain *chain, Py_ssize_t i, uint8_t *message, Py_ssize_t *why) {
    PyObject *extra = chain->extras ? chain->extras[i] : Py_None;
    int is_pickle = chain->form == &PICKLE;
    uint8_t *end = chain->put(chain->tokens->items, i * chain->block_size, chain->block_size,
                              message + chain->tokens_at, why);
    size_t length, padded;

    if (!end)
        return 0;
    if (is_pickle) {
        *end++ = chain->tuple;
        *end++ = MEMOIZE;
    }
    if (extra == Py_None) {
        *end++ = is_pickle ? NONE : CBOR_NONE;
    } else {
        size_t extra_size = (size_t)PyBytes_GET_SIZE(extra);
        memcpy(end, PyBytes_AS_STRING(extra), extra_size);
        end += extra_size;
    }
    if (is_pickle) {
        *end++ = TUPLE3;
        *end++ = MEMOIZE;
        *end++ = STOP;
        length = (size_t)(end - message) - FRAME_AT;
        if (length >= FRAME_LIMIT) {
            *why = LEFT_TO_PICKLE;
            return 0;
        }
        message[FRAME_SIZE_AT] = (uint8_t)length;
        message[FRAME_SIZE_AT + 1] = (uint8_t)(length >> 8);
    }
    length = (size_t)(end - message);
    padded = (length + 1 + 8 + 63) / 64 * 64;
    *end++ = 0x80;
    memset(end, 0, padded - length - 1);
    store_be32(message + padded - 8, (uint32_t)((uint64_t)length >> 29));
    store_be32(message + padded - 4, (uint32_t)((uint64_t)length << 3));
    return padded / 64;
}

/* Hashes all blocks and checks the tokens behind them. Returns DONE or why it ended before.
 * Touches no reference count, so it may run without the interpreter lock if the tokens are an array. */
static Py_ssize_t run_chain(const Chain *chain) {
    const Tokens *tokens = chain->tokens;
    const uint8_t *parent = chain->parent;
    uint8_t *digest = chain->digests;
    uint8_t scratch[64 * MAX_TOKEN + STORE_SLACK];
    PyObject *const *extras = chain->form == &PICKLE ? chain->extras : NULL; /* that may hold the parent */
    Py_ssize_t why = DONE, i;
    size_t num_chunks = 0, num_chunks_next = 0;

    if (chain->num_blocks > 0 && !(num_chunks = write_message(chain, 0, chain->messages[0], &why)))
        return why;
    for (i = 0; i < chain->num_blocks; i++) {
        if (i + 1 < chain->num_blocks &&
            !(num_chunks_next = write_message(chain, i + 1, chain->messages[(i + 1) & 1], &why)))
            return why;
        if (extras && extras[i] != Py_None && holds_parent(extras[i], parent))
            return LEFT_TO_PICKLE;
        chain->finish(chain->messages[i & 1], num_chunks, chain->form->parent_at, parent, digest);
        num_chunks = num_chunks_next;
        parent = digest;
        digest += DIGEST_SIZE;
    }
    for (i = chain->num_blocks * chain->block_size; i < tokens->count; i += 64) {
        Py_ssize_t count = tokens->count - i < 64 ? tokens->count - i : 64;
        if (!chain->put(tokens->items, i, count, scratch, &why))
            return why;
    }
    return DONE;
}

/* Room for a message of the largest block: everything before the padding, the padding and what stores clobber. */
static size_t message_size(const Chain *chain, size_t max_extra) {
    size_t size = PICKLE_PARENT_AT + DIGEST_SIZE + MAX_HEADER + (size_t)chain->block_size * MAX_TOKEN + max_extra +
                  MAX_ENDING + 72 + STORE_SLACK;
    return (size + 63) / 64 * 64;
}

/* Two messages in `memory`, with all that is the same in every block. */
static void start_messages(Chain *chain, uint8_t *memory, size_t size) {
    for (int i = 0; i < 2; i++) {
        uint8_t *message = chain->messages[i] = memory + i * size;
        size_t at = chain->form->parent_at;

        memcpy(message, chain->form->start, sizeof chain->form->start);
        memset(message + at, 0, DIGEST_SIZE);
        at += DIGEST_SIZE;
        if (chain->form == &CBOR) {
            at += put_array_header(message + at, (uint64_t)chain->block_size);
        } else {
            message[at++] = MEMOIZE;
            if (chain->block_size > 3)
                message[at++] = MARK;
        }
        chain->tokens_at = at;
    }
    chain->tuple = (uint8_t)(chain->block_size > 3 ? TUPLE : TUPLE1 - 1 + chain->block_size);
}

/* The size of the largest extra value, or -1: each is None or bytes, one per block. */
static Py_ssize_t check_extras(PyObject *extras, Py_ssize_t num_blocks) {
    Py_ssize_t largest = 1;

    if (PyTuple_GET_SIZE(extras) != num_blocks) {
        PyErr_Format(PyExc_ValueError, "extras has %zd entries for %zd blocks", PyTuple_GET_SIZE(extras), num_blocks);
        return -1;
    }
    for (Py_ssize_t i = 0; i < num_blocks; i++) {
        PyObject *extra = PyTuple_GET_ITEM(extras, i);
        if (extra == Py_None)
            continue;
        if (!PyBytes_Check(extra)) {
            PyErr_Format(PyExc_TypeError, "extras[%zd] must be None or bytes, not %.80s", i, Py_TYPE(extra)->tp_name);
            return -1;
        }
        if (PyBytes_GET_SIZE(extra) > largest)
            largest = PyBytes_GET_SIZE(extra);
    }
    return largest;
}

/* ------------------------------------------------------------------------------------------------ the module */

typedef struct {
    PyObject *token_id_error;
    finish_fn fastest; /* asked once: cpuid is slow, very slow in a virtual machine */
} State;

static void raise_bad_token(PyObject *module, const Tokens *tokens, Py_ssize_t bad) {
    State *state = PyModule_GetState(module);
    PyObject *value, *error;

    if (tokens->kind == OBJECTS) {
        value = Py_NewRef(((PyObject *const *)tokens->items)[bad]);
    } else if (tokens->kind == INT32) {
        int32_t id;
        memcpy(&id, (const char *)tokens->items + bad * (Py_ssize_t)sizeof id, sizeof id);
        value = PyLong_FromLong(id);
    } else {
        int64_t id;
        memcpy(&id, (const char *)tokens->items + bad * (Py_ssize_t)sizeof id, sizeof id);
        value = PyLong_FromLongLong(id);
    }
    if (!value)
        return;
    error = PyObject_CallFunction(state->token_id_error, "nO", tokens->first + bad, value);
    Py_DECREF(value);
    if (error) {
        PyErr_SetObject(state->token_id_error, error);
        Py_DECREF(error);
    }
}

/* The digests of open tokens: bytes, or None if pickle has to make them. */
static PyObject *hash_tokens(PyObject *module, Chain *chain, const Tokens *tokens, size_t max_extra) {
    uint8_t small[2048], *memory = small;
    size_t size = message_size(chain, max_extra);
    PyObject *result;
    Py_ssize_t why;

    if (chain->num_blocks > PY_SSIZE_T_MAX / DIGEST_SIZE)
        return PyErr_NoMemory();
    if (chain->num_blocks > 0) {
        if (2 * size > sizeof small && !(memory = PyMem_RawMalloc(2 * size)))
            return PyErr_NoMemory();
        start_messages(chain, memory, size);
    }
    if ((result = PyBytes_FromStringAndSize(NULL, chain->num_blocks * DIGEST_SIZE))) {
        chain->digests = (uint8_t *)PyBytes_AS_STRING(result);
        chain->tokens = tokens;
        chain->put = chain->form->put[tokens->kind];
        if (!tokens->held && tokens->count >= RELEASE_LOCK_FROM) {
            Py_BEGIN_ALLOW_THREADS
            why = run_chain(chain);
            Py_END_ALLOW_THREADS
        } else {
            why = run_chain(chain);
        }
        if (why == LEFT_TO_PICKLE) {
            Py_SETREF(result, Py_NewRef(Py_None));
        } else if (why != DONE) {
            Py_CLEAR(result);
            raise_bad_token(module, tokens, why);
        }
    }
    if (memory != small)
        PyMem_RawFree(memory);
    return result;
}

/* The digests for `args`, which are block_size, parent, extras, num_blocks and portable. Reads up to `most` of the
 * tokens in `object` from position `first` on; if `most` is negative, as many as the blocks have. */
static PyObject *hash_chain(PyObject *module, PyObject *form, PyObject *object, Py_ssize_t first, Py_ssize_t most,
                            PyObject *const *args) {
    Tokens tokens;
    Chain chain = {0};
    PyObject *extras = NULL, *result = NULL;
    Py_ssize_t max_extra = 1;
    int portable;

    if (PyUnicode_Check(form) && PyUnicode_CompareWithASCIIString(form, "cbor") == 0) {
        chain.form = &CBOR;
    } else if (PyUnicode_Check(form) && PyUnicode_CompareWithASCIIString(form, "pickle") == 0) {
        chain.form = &PICKLE;
    } else {
        PyErr_Format(PyExc_ValueError, "form must be 'cbor' or 'pickle', not %R", form);
        return NULL;
    }
    if ((chain.block_size = PyLong_AsSsize_t(args[0])) == -1 && PyErr_Occurred())
        return NULL;
    if (!PyBytes_Check(args[1]) || PyBytes_GET_SIZE(args[1]) != DIGEST_SIZE) {
        PyErr_SetString(PyExc_ValueError, "parent must be 32 bytes");
        return NULL;
    }
    if (chain.form == &PICKLE && !PyBytes_CheckExact(args[1])) /* its class is part of the pickle */
        Py_RETURN_NONE;
    chain.parent = (const uint8_t *)PyBytes_AS_STRING(args[1]);
    if ((chain.num_blocks = PyLong_AsSsize_t(args[3])) == -1 && PyErr_Occurred())
        return NULL;
    if ((portable = PyObject_IsTrue(args[4])) < 0)
        return NULL;
    chain.finish = portable ? finish_portable : ((State *)PyModule_GetState(module))->fastest;
    if (chain.block_size < 1 || chain.num_blocks < 0 || chain.num_blocks > PY_SSIZE_T_MAX / chain.block_size) {
        PyErr_Format(PyExc_ValueError, "%zd blocks of %zd tokens", chain.num_blocks, chain.block_size);
        return NULL;
    }
    if (args[2] != Py_None) {
        if (!(extras = PySequence_Tuple(args[2])))
            return NULL;
        if ((max_extra = check_extras(extras, chain.num_blocks)) < 0)
            goto done;
        chain.extras = PySequence_Fast_ITEMS(extras);
    }
    if (open_tokens(object, first, most < 0 ? chain.num_blocks * chain.block_size : most, &tokens) < 0)
        goto done;
    if (tokens.count < chain.num_blocks * chain.block_size)
        PyErr_Format(PyExc_ValueError, "there are no %zd blocks of %zd tokens from position %zd on", chain.num_blocks,
                     chain.block_size, first);
    else
        result = hash_tokens(module, &chain, &tokens, (size_t)max_extra);
    close_tokens(&tokens);
done:
    Py_XDECREF(extras);
    return result;
}

static int count_arguments(const char *name, Py_ssize_t expected, Py_ssize_t nargs) {
    if (nargs == expected)
        return 0;
    PyErr_Format(PyExc_TypeError, "%s() takes %zd arguments (%zd given)", name, expected, nargs);
    return -1;
}

PyDoc_STRVAR(chain_doc,
             "chain(form, tokens, block_size, parent, extras, num_blocks, portable, /)\n--\n\n"
             "Digests of the first num_blocks blocks, concatenated; the tokens behind them are only checked.\n"
             "Uses the SHA instructions if HAS_SHA_NI and not portable. None if pickle itself has to be asked.");

static PyObject *sha_chain(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    if (count_arguments("chain", 7, nargs) < 0)
        return NULL;
    return hash_chain(module, args[0], args[1], 0, PY_SSIZE_T_MAX, args + 2);
}

PyDoc_STRVAR(chain_list_doc,
             "chain_list(form, tokens, first, block_size, parent, extras, num_blocks, portable, /)\n--\n\n"
             "The same as a list of digests, of num_blocks blocks from tokens[first] on; no other token is read.");

static PyObject *sha_chain_list(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    PyObject *digests, *list, *digest;
    Py_ssize_t first, count;

    if (count_arguments("chain_list", 8, nargs) < 0)
        return NULL;
    if ((first = PyLong_AsSsize_t(args[2])) == -1 && PyErr_Occurred())
        return NULL;
    digests = hash_chain(module, args[0], args[1], first, -1, args + 3);
    if (!digests || digests == Py_None)
        return digests;
    count = PyBytes_GET_SIZE(digests) / DIGEST_SIZE;
    if (!(list = PyList_New(count)) || count == 0) {
        Py_DECREF(digests);
        return list;
    }
    if (count == 1) {
        PyList_SET_ITEM(list, 0, digests);
        return list;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!(digest = PyBytes_FromStringAndSize(PyBytes_AS_STRING(digests) + i * DIGEST_SIZE, DIGEST_SIZE))) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, i, digest);
    }
    Py_DECREF(digests);
    return list;
}

static PyMethodDef methods[] = {
    {"chain", (PyCFunction)(void (*)(void))sha_chain, METH_FASTCALL, chain_doc},
    {"chain_list", (PyCFunction)(void (*)(void))sha_chain_list, METH_FASTCALL, chain_list_doc},
    {NULL, NULL, 0, NULL},
};

static int exec_module(PyObject *module) {
    State *state = PyModule_GetState(module);
    PyObject *errors = PyImport_ImportModule("blockpool.hashing.errors");

    if (!errors)
        return -1;
    state->token_id_error = PyObject_GetAttrString(errors, "TokenIdError");
    Py_DECREF(errors);
    if (!state->token_id_error)
        return -1;
    state->fastest = fastest_finish();
    return PyModule_AddObjectRef(module, "HAS_SHA_NI", state->fastest == finish_portable ? Py_False : Py_True);
}

static int traverse_module(PyObject *module, visitproc visit, void *arg) {
    State *state = PyModule_GetState(module);
    if (state)
        Py_VISIT(state->token_id_error);
    return 0;
}

static int clear_module(PyObject *module) {
    State *state = PyModule_GetState(module);
    if (state)
        Py_CLEAR(state->token_id_error);
    return 0;
}

static void free_module(void *module) { clear_module((PyObject *)module); }

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)exec_module},
#ifdef Py_mod_multiple_interpreters
    {Py_mod_multiple_interpreters, Py_MOD_PER_INTERPRETER_GIL_SUPPORTED},
#endif
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "blockpool.hashing._sha",
    .m_doc = "SHA-256 chain over blocks; see kernel.py, which is the door.",
    .m_size = sizeof(State),
    .m_methods = methods,
    .m_slots = slots,
    .m_traverse = traverse_module,
    .m_clear = clear_module,
    .m_free = free_module,
};

PyMODINIT_FUNC PyInit__sha(void) { return PyModuleDef_Init(&definition); }
