/* The CPU path's own kernels, as the Python module `_cpu`: the parts of a decoder layer, and a layer
 * in one call. `foresay.core.worker.cpu_kernels` is its face, and says what the arguments are; here
 * they are addresses and sizes, taken as they come.
 *
 * For GCC and Clang, with -ffp-contract=off: what is rounded once is said, and is not the compiler's
 * choice. Where it can't be built foresay runs on torch's operations instead.
 */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <dlfcn.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { VERSION = 1 }; /* to be raised with that of `cpu_kernels.py` when arguments change */
enum { FIRST_KEY, NUM_KEYS, OWN_FROM, FIRST_OWN, ROW_FIELDS }; /* of a row, see `attend` */
enum { MAX_DIM = 256, MAX_FOLD = 16, MAX_ROWS = 8, MAX_TOGETHER = 4, SPAN = 64 };
enum { PANEL = 32, CHUNK = 64, AHEAD = 48 }; /* columns; inputs; inputs */
enum { BLOCK_ROWS = 96 }; /* that pass all panels before the next do: they stay in the cache */

#ifdef __has_builtin
#define HAS_SHUFFLEVECTOR __has_builtin(__builtin_shufflevector)
#else
#define HAS_SHUFFLEVECTOR 0
#endif

/* Loops whose vectors are to stay in registers. */
#define UNROLL _Pragma("GCC unroll 16")

struct choice {
    const float *x;
    int64_t *columns;
    float *log_probs;
    int64_t num_rows, num_columns, width, x_stride;
};

struct norm {
    const float *x, *weight;
    float *y;
    int64_t num_rows, width, x_stride;
    float eps;
};

struct gated {
    const float *x;
    float *y;
    int64_t num_rows, width, x_stride;
};

struct rotation {
    float *x;
    const float *cos, *sin;
    int64_t num_rows, num_heads, head_dim, x_stride;
};

struct attention {
    const float *query;
    const float *pool;
    float *out;
    const int64_t *slots, *rows, *tiles;
    int64_t num_tiles, query_stride, slot_stride, num_heads, num_kv_heads, head_dim, value_dim;
    int64_t window; /* 0: none */
    float scale;
};

struct product {
    const float *x;
    const void *weight;  /* [panels, in_features, PANEL] float16, or int8 where there are scales */
    const float *scales; /* [out_features], or NULL */
    float *y;
    const float *bias, *residual; /* or NULL */
    int64_t num_rows, in_features, out_features, x_stride;
    int64_t num_panels;
    float scale;
};

struct kernels {
    int lanes; /* floats of a vector */
    void (*likeliest)(const struct choice *, int64_t row);
    void (*rms_norm)(const struct norm *, int64_t row);
    void (*silu_mul)(const struct gated *, int64_t row);
    void (*rotate)(const struct rotation *, int64_t row);
    void (*attend)(const struct attention *, int64_t item);
    void (*product)(const struct product *, int64_t item); /* or NULL */
};

/* Returns the first key that a row sees. */
static inline int64_t first_seen(const int64_t *row, int64_t window) {
    return window > 0 && row[NUM_KEYS] > window ? row[NUM_KEYS] - window : 0;
}

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#define TARGET __attribute__((target("f16c,avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")))
#define LANES 16
#define NAME(x) x##_avx512
#define FMA(a, b, c) ((vec_avx512)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c)))
#define LARGER(a, b) ((vec_avx512)_mm512_max_ps((__m512)(a), (__m512)(b)))
#define HALF(from) ((vec_avx512)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(from))))
#define BYTES(from)                                                                                \
    ((vec_avx512)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(from)))))
#define MOST_ROWS 12
#include "cpu_kernels.h"
#define TARGET __attribute__((target("f16c,avx2,fma")))
#define LANES 8
#define NAME(x) x##_avx2
#define FMA(a, b, c) ((vec_avx2)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))
#define LARGER(a, b) ((vec_avx2)_mm256_max_ps((__m256)(a), (__m256)(b)))
#define HALF(from) ((vec_avx2)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from))))
#define BYTES(from)                                                                                \
    ((vec_avx2)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(from)))))
#define MOST_ROWS 3
#include "cpu_kernels.h"
#endif
#define TARGET
#define LANES 4
#define NAME(x) x##_baseline
#if defined(__aarch64__)
#include <arm_neon.h>
#define FMA(a, b, c)                                                                               \
    ((vec_baseline)vfmaq_f32((float32x4_t)(c), (float32x4_t)(a), (float32x4_t)(b)))
#else
#define FMA(a, b, c) ((a) * (b) + (c))
#endif
#define LARGER(a, b) choose_baseline((ints_baseline)((a) > (b)), a, b)
#include "cpu_kernels.h"

static const struct {
    const char *name;
    const struct kernels *kernels;
} sets[] = {
#if defined(__x86_64__)
    {"avx512", &kernels_avx512},
    {"avx2", &kernels_avx2},
#endif
    {"baseline", &kernels_baseline},
};
enum { NUM_SETS = sizeof sets / sizeof *sets };

static const struct kernels *chosen = NULL;

static int is_supported(int set) {
#if defined(__x86_64__)
    unsigned eax, ebx, ecx = 0, edx; /* not all compilers know "f16c" by name */
    const int has_f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
    const int has_avx2 =
        has_f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (set == 0)
        return has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl")
            && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
    if (set == 1) return has_avx2;
#endif
    return set < NUM_SETS;
}

/* --- threads: those of torch's own OpenMP, where it is GNU's or has its entry points. A second pool
 * would fight with them for the cores. */

typedef void (*parallel_fn)(void (*)(void *), void *, unsigned, unsigned);
static parallel_fn parallel = NULL;

/* Items are taken so many at a time. */
struct share {
    void (*run)(const void *task, int64_t item);
    const void *task;
    int64_t num_items, at_once, next;
};

static void take(void *of) {
    struct share *share = of;
    for (;;) {
        int64_t item = __atomic_fetch_add(&share->next, share->at_once, __ATOMIC_RELAXED);
        if (item >= share->num_items) return;
        int64_t end = item + share->at_once;
        if (end > share->num_items) end = share->num_items;
        for (; item < end; item++) share->run(share->task, item);
    }
}

/* Runs all items, each about `work` numbers read, computed with and written. */
static void share_out(
    void (*run)(const void *, int64_t), const void *task, int64_t num_items, double work,
    int64_t threads
) {
    const double least = 65536, at_a_time = 8192; /* numbers for which a thread more pays */
    struct share share = {run, task, num_items, num_items, 0};
    /* Always as many threads as torch takes: GNU's OpenMP ends those that a smaller team leaves out,
     * and makes them anew for the next larger one. */
    if (threads <= 1 || num_items < 2 || work * (double)num_items < 2 * least || !parallel) {
        take(&share);
        return;
    }
    share.at_once = (int64_t)(at_a_time / (work + 1)) + 1;
    if (share.at_once < num_items / (8 * threads)) share.at_once = num_items / (8 * threads);
    parallel(take, &share, (unsigned)threads, 0);
}

#define SHARE(kernel, task, num_items, work, threads)                                              \
    share_out((void (*)(const void *, int64_t))chosen->kernel, task, num_items, work, threads)

static void run_norm(const struct norm *task, int64_t threads) {
    SHARE(rms_norm, task, task->num_rows, (double)task->width, threads);
}

static void run_silu_mul(const struct gated *task, int64_t threads) {
    SHARE(silu_mul, task, task->num_rows, 4.0 * (double)task->width, threads);
}

static void run_rotation(const struct rotation *task, int64_t threads) {
    SHARE(rotate, task, task->num_rows, (double)(task->num_heads * task->head_dim), threads);
}

static void run_attention(const struct attention *task, int64_t threads) {
    /* What all items read: most of it is far from the cores, so that threads pay soon. */
    double numbers = 0;
    for (int64_t tile = 0; tile < task->num_tiles; tile++)
        for (int64_t row = 0; row < task->tiles[2 * tile + 1]; row++) {
            const int64_t *of = task->rows + (task->tiles[2 * tile] + row) * ROW_FIELDS;
            numbers += (double)(of[NUM_KEYS] - first_seen(of, task->window));
        }
    numbers *= (double)(task->num_heads * (task->head_dim + task->value_dim)) / 2;
    const int64_t num_items = task->num_tiles * task->num_kv_heads;
    const struct kernels *kernels = chosen; /* or those of shorter vectors, if heads need them */
    for (int set = 0; task->head_dim % kernels->lanes || task->value_dim % kernels->lanes; set++)
        if (sets[set].kernels->lanes < kernels->lanes && is_supported(set))
            kernels = sets[set].kernels;
    share_out(
        (void (*)(const void *, int64_t))kernels->attend, task, num_items,
        numbers / (double)(num_items ? num_items : 1), threads
    );
}

static void run_product(struct product *task, int64_t threads) {
    task->num_panels = (task->out_features + PANEL - 1) / PANEL;
    const int64_t num_blocks = (task->num_rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    const double work = (double)(task->in_features * PANEL);
    SHARE(product, task, num_blocks * task->num_panels, work, threads);
}

/* --- a layer */

/* What stays the same from step to step, as numbers and addresses; see `cpu_layer`. */
enum {
    HIDDEN, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, INTERMEDIATE, WINDOW, ATTENTION_NORM, MLP_NORM,
    QUERY_NORM, KEY_NORM, /* or 0 */
    QKV, /* weight, bias or 0, scales or 0, and the power of two that the product is times */
    OUT = QKV + 4, GATE_UP = OUT + 4, DOWN = GATE_UP + 4, LAYER_FIELDS = DOWN + 4
};

static struct product product_of(const int64_t *fields, int64_t num_rows, int64_t in, int64_t out) {
    return (struct product){
        .weight = (const void *)fields[0], .bias = (const float *)fields[1],
        .scales = (const float *)fields[2], .scale = ldexpf(1.0f, (int)fields[3]),
        .num_rows = num_rows, .in_features = in, .out_features = out, .x_stride = in,
    };
}

/* Runs a layer over `num_rows` rows of the residual stream `x`, into `y`. `attention` has all but
 * what the layer makes itself. `scratch`: num_rows * (2 hidden + qkv + heads + 3 intermediate). */
static void run_layer(
    const int64_t *layer, const float *x, float *y, float *scratch, const float *cos,
    const float *sin, const int64_t *slot_mapping, float *pool, struct attention attention,
    int64_t num_rows, int64_t threads, float eps
) {
    const int64_t hidden = layer[HIDDEN], dim = layer[HEAD_DIM], wide = layer[INTERMEDIATE];
    const int64_t num_heads = layer[NUM_HEADS], num_kv_heads = layer[NUM_KV_HEADS];
    const int64_t heads_width = num_heads * dim, kv_width = 2 * num_kv_heads * dim;
    const int64_t width = heads_width + kv_width;
    float *normed = scratch, *qkv = normed + num_rows * hidden, *attended = qkv + num_rows * width;
    float *between = attended + num_rows * heads_width, *gate_up = between + num_rows * hidden;
    float *gated = gate_up + num_rows * 2 * wide;

    struct norm norm = {
        x, (const float *)layer[ATTENTION_NORM], normed, num_rows, hidden, hidden, eps
    };
    run_norm(&norm, threads);
    struct product product = product_of(layer + QKV, num_rows, hidden, width);
    product.x = normed, product.y = qkv;
    run_product(&product, threads);
    for (int64_t row = 0; layer[QUERY_NORM] && row < num_rows; row++) {
        float *heads = qkv + row * width, *keys = heads + heads_width;
        struct norm of_heads[2] = {
            {heads, (const float *)layer[QUERY_NORM], heads, num_heads, dim, dim, eps},
            {keys, (const float *)layer[KEY_NORM], keys, num_kv_heads, dim, dim, eps},
        };
        run_norm(of_heads, 1);
        run_norm(of_heads + 1, 1);
    }
    struct rotation rotation = {qkv, cos, sin, num_rows, num_heads + num_kv_heads, dim, width};
    run_rotation(&rotation, threads);
    for (int64_t row = 0; row < num_rows; row++)
        memcpy(
            pool + slot_mapping[row] * attention.slot_stride, qkv + row * width + heads_width,
            (size_t)kv_width * sizeof *pool
        );
    attention.query = qkv, attention.query_stride = width, attention.out = attended;
    attention.pool = pool, attention.num_heads = num_heads, attention.num_kv_heads = num_kv_heads;
    attention.head_dim = attention.value_dim = dim, attention.window = layer[WINDOW];
    run_attention(&attention, threads);
    product = product_of(layer + OUT, num_rows, heads_width, hidden);
    product.x = attended, product.y = between, product.residual = x;
    run_product(&product, threads);

    norm.x = between, norm.weight = (const float *)layer[MLP_NORM];
    run_norm(&norm, threads);
    product = product_of(layer + GATE_UP, num_rows, hidden, 2 * wide);
    product.x = normed, product.y = gate_up;
    run_product(&product, threads);
    struct gated gate = {gate_up, gated, num_rows, wide, 2 * wide};
    run_silu_mul(&gate, threads);
    product = product_of(layer + DOWN, num_rows, wide, hidden);
    product.x = gated, product.y = y, product.residual = between;
    run_product(&product, threads);
}

/* --- Python */

/* Reads whole numbers, and a float behind them if there is a place for it; returns 0 with an
 * exception if the arguments are others. */
static int
take_arguments(PyObject *const *args, Py_ssize_t given, int64_t *values, Py_ssize_t count, double *last) {
    const Py_ssize_t expected = count + (last != NULL);
    if (given != expected) {
        PyErr_Format(PyExc_TypeError, "%zd arguments, expected %zd", given, expected);
        return 0;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        values[i] = PyLong_AsLongLong(args[i]);
        if (values[i] == -1 && PyErr_Occurred()) return 0;
    }
    if (last == NULL) return 1;
    *last = PyFloat_AsDouble(args[count]);
    return *last != -1.0 || !PyErr_Occurred();
}

static int has_product(void) {
    if (chosen->product == NULL)
        PyErr_SetString(PyExc_RuntimeError, "there are no products with this instruction set");
    return chosen->product != NULL;
}

static int has_heads(int64_t num_heads, int64_t num_kv_heads, int64_t dim, int64_t value_dim) {
    if (dim % 4 == 0 && dim <= MAX_DIM && value_dim % 4 == 0 && value_dim <= MAX_DIM
        && num_heads <= MAX_FOLD * num_kv_heads)
        return 1;
    PyErr_SetString(PyExc_ValueError, "heads of a shape that the kernel does not have");
    return 0;
}

/* Runs something with the interpreter free for other threads, and returns None. */
#define DONE(what)                                                                                 \
    Py_BEGIN_ALLOW_THREADS what;                                                                   \
    Py_END_ALLOW_THREADS Py_RETURN_NONE

static PyObject *rms_norm(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    int64_t v[7];
    double eps;
    (void)self;
    if (!take_arguments(args, count, v, 7, &eps)) return NULL;
    const struct norm task = {
        (const float *)v[0], (const float *)v[1], (float *)v[2], v[3], v[4], v[5], (float)eps
    };
    DONE(run_norm(&task, v[6]));
}

static PyObject *likeliest(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    int64_t v[8];
    (void)self;
    if (!take_arguments(args, count, v, 8, NULL)) return NULL;
    const struct choice task = {
        (const float *)v[0], (int64_t *)v[1], (float *)v[2], v[3], v[4], v[5], v[6]
    };
    DONE(SHARE(likeliest, &task, task.num_rows, 4.0 * (double)task.num_columns, v[7]));
}

static PyObject *silu_mul(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    int64_t v[6];
    (void)self;
    if (!take_arguments(args, count, v, 6, NULL)) return NULL;
    const struct gated task = {(const float *)v[0], (float *)v[1], v[2], v[3], v[4]};
    DONE(run_silu_mul(&task, v[5]));
}

static PyObject *rotate(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    int64_t v[8];
    (void)self;
    if (!take_arguments(args, count, v, 8, NULL)) return NULL;
    const struct rotation task = {
        (float *)v[0], (const float *)v[1], (const float *)v[2], v[3], v[4], v[5], v[6]
    };
    DONE(run_rotation(&task, v[7]));
}

static PyObject *attend(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    int64_t v[15];
    double scale;
    (void)self;
    if (!take_arguments(args, count, v, 15, &scale)) return NULL;
    if (!has_heads(v[9], v[10], v[11], v[12])) return NULL;
    const struct attention task = {
        .query = (const float *)v[0], .pool = (const float *)v[1], .out = (float *)v[2],
        .slots = (const int64_t *)v[3], .rows = (const int64_t *)v[4],
        .tiles = (const int64_t *)v[5], .num_tiles = v[6], .query_stride = v[7],
        .slot_stride = v[8], .num_heads = v[9], .num_kv_heads = v[10], .head_dim = v[11],
        .value_dim = v[12], .window = v[13], .scale = (float)scale,
    };
    DONE(run_attention(&task, v[14]));
}

static PyObject *product(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    int64_t v[12];
    (void)self;
    if (!take_arguments(args, count, v, 12, NULL) || !has_product()) return NULL;
    struct product task = {
        .x = (const float *)v[0], .weight = (const void *)v[1], .y = (float *)v[2],
        .bias = (const float *)v[3], .residual = (const float *)v[4],
        .scales = (const float *)v[5], .scale = ldexpf(1.0f, (int)v[6]), .num_rows = v[7],
        .in_features = v[8], .out_features = v[9], .x_stride = v[10],
    };
    DONE(run_product(&task, v[11]));
}

static PyObject *layer(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    int64_t v[15];
    double eps;
    (void)self;
    if (!take_arguments(args, count, v, 15, &eps) || !has_product()) return NULL;
    const int64_t *of = (const int64_t *)v[0];
    if (!has_heads(of[NUM_HEADS], of[NUM_KV_HEADS], of[HEAD_DIM], of[HEAD_DIM])) return NULL;
    const struct attention attention = {
        .slots = (const int64_t *)v[8], .rows = (const int64_t *)v[9],
        .tiles = (const int64_t *)v[10], .num_tiles = v[11], .slot_stride = v[12],
        .scale = (float)(1.0 / sqrt((double)of[HEAD_DIM])),
    };
    DONE(run_layer(
        of, (const float *)v[1], (float *)v[2], (float *)v[3], (const float *)v[4],
        (const float *)v[5], (const int64_t *)v[6], (float *)v[7], attention, v[13], v[14],
        (float)eps
    ));
}

static PyObject *has_products(PyObject *self, PyObject *args) {
    (void)self, (void)args;
    return PyBool_FromLong(chosen->product != NULL);
}

static PyObject *supported(PyObject *self, PyObject *args) {
    (void)self, (void)args;
    PyObject *names = PyList_New(0);
    for (int set = 0; names != NULL && set < NUM_SETS; set++) {
        if (!is_supported(set)) continue;
        PyObject *name = PyUnicode_FromString(sets[set].name);
        if (name == NULL || PyList_Append(names, name)) Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}

static PyObject *used(PyObject *self, PyObject *args) {
    (void)self, (void)args;
    for (int set = 0; set < NUM_SETS; set++)
        if (sets[set].kernels == chosen) return PyUnicode_FromString(sets[set].name);
    Py_RETURN_NONE;
}

static PyObject *use(PyObject *self, PyObject *name) {
    (void)self;
    for (int set = 0; set < NUM_SETS; set++) {
        if (!is_supported(set)) continue;
        PyObject *known = PyUnicode_FromString(sets[set].name);
        if (known == NULL) return NULL;
        const int is_it = PyObject_RichCompareBool(known, name, Py_EQ);
        Py_DECREF(known);
        if (is_it < 0) return NULL;
        if (is_it) {
            chosen = sets[set].kernels;
            Py_RETURN_NONE;
        }
    }
    return PyErr_Format(PyExc_ValueError, "%R: see `supported()`", name);
}

static PyMethodDef methods[] = {
    {"likeliest", (PyCFunction)(void (*)(void))likeliest, METH_FASTCALL, NULL},
    {"rms_norm", (PyCFunction)(void (*)(void))rms_norm, METH_FASTCALL, NULL},
    {"silu_mul", (PyCFunction)(void (*)(void))silu_mul, METH_FASTCALL, NULL},
    {"rotate", (PyCFunction)(void (*)(void))rotate, METH_FASTCALL, NULL},
    {"attend", (PyCFunction)(void (*)(void))attend, METH_FASTCALL, NULL},
    {"product", (PyCFunction)(void (*)(void))product, METH_FASTCALL, NULL},
    {"layer", (PyCFunction)(void (*)(void))layer, METH_FASTCALL, NULL},
    {"has_products", has_products, METH_NOARGS, "Whether this instruction set has `product`."},
    {"supported", supported, METH_NOARGS, "The instruction sets this CPU has, the best first."},
    {"used", used, METH_NOARGS, "The one that is used."},
    {"use", use, METH_O, "Use one of `supported()` from now on, in all threads."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_cpu", NULL, -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__cpu(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
#endif
    for (int set = NUM_SETS; set-- > 0;)
        if (is_supported(set)) chosen = sets[set].kernels;
    parallel = (parallel_fn)dlsym(RTLD_DEFAULT, "GOMP_parallel");
    PyObject *made = PyModule_Create(&module);
    if (made != NULL && PyModule_AddIntConstant(made, "VERSION", VERSION)) Py_CLEAR(made);
    return made;
}
