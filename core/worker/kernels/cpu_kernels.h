/* Kernels of the CPU path for one instruction set: included by `cpu.c` once for each.
 *
 * The includer defines, and finds undefined again: TARGET, the attribute that allows the
 * instructions; LANES, the floats of a vector; NAME(x), the name of a function of this set; FMA and
 * LARGER of vectors; and for matrix products HALF and BYTES, which load weights, and MOST_ROWS, for
 * which there are registers. All numbers are float32.
 *
 * A row's result depends on the row alone. Each row is computed by the same code on the same
 * places, whichever rows come along and whichever thread takes it: nothing is summed across rows,
 * and how a sum over keys is split depends on their positions only.
 */

typedef float NAME(vec) __attribute__((vector_size(LANES * 4)));
typedef float NAME(vec_unaligned) __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t NAME(ints) __attribute__((vector_size(LANES * 4)));
#define VEC NAME(vec)
#define INTS NAME(ints)
#define INLINE static inline __attribute__((always_inline)) TARGET

INLINE VEC NAME(load)(const float *from) { return *(const NAME(vec_unaligned) *)from; }
INLINE void NAME(store)(float *to, VEC x) { *(NAME(vec_unaligned) *)to = x; }
INLINE VEC NAME(all)(float x) { return x - (VEC){0}; }
/* Where `mask` is set, which comparisons make of all bits, those of `a`, elsewhere those of `b`. */
INLINE VEC NAME(choose)(INTS mask, VEC a, VEC b) {
    return (VEC)(((INTS)a & mask) | ((INTS)b & ~mask));
}
/* a * b + c, rounded once where there are instructions for it. Nothing else is contracted, see
 * `cpu.c`: a row goes through the same roundings in every variant of a loop. */
INLINE VEC NAME(fma)(VEC a, VEC b, VEC c) { return FMA(a, b, c); }
/* The larger one; `b` if one is no number. */
INLINE VEC NAME(larger)(VEC a, VEC b) { return LARGER(a, b); }

/* Of two vectors, taken as groups of `h` lanes: the sums of each two neighbouring groups, those of
 * `a` and of `b` in turns. */
#define AT(lane, h, o) (((lane) / (h)) % 2 * LANES + (lane) / (h) / 2 * 2 * (h) + (lane) % (h) + (o))
#if LANES == 16
#define LIST(h, o)                                                                                 \
    AT(0, h, o), AT(1, h, o), AT(2, h, o), AT(3, h, o), AT(4, h, o), AT(5, h, o), AT(6, h, o),     \
        AT(7, h, o), AT(8, h, o), AT(9, h, o), AT(10, h, o), AT(11, h, o), AT(12, h, o),           \
        AT(13, h, o), AT(14, h, o), AT(15, h, o)
#elif LANES == 8
#define LIST(h, o)                                                                                 \
    AT(0, h, o), AT(1, h, o), AT(2, h, o), AT(3, h, o), AT(4, h, o), AT(5, h, o), AT(6, h, o),     \
        AT(7, h, o)
#else
#define LIST(h, o) AT(0, h, o), AT(1, h, o), AT(2, h, o), AT(3, h, o)
#endif
#if HAS_SHUFFLEVECTOR
#define PICKED(a, b, h, o) __builtin_shufflevector(a, b, LIST(h, o))
#else /* GCC before 12 */
#define PICKED(a, b, h, o) __builtin_shuffle(a, b, (INTS){LIST(h, o)})
#endif
#define GROUPS(a, b, h, op) op(PICKED(a, b, h, 0), PICKED(a, b, h, h))
#define PLUS(a, b) ((a) + (b))

/* The sum over the lanes of each of `x`: lane i of the result is that of the vector whose number is
 * i with its bits reversed. */
INLINE VEC NAME(sums)(VEC x[LANES]) {
#if LANES == 16
    UNROLL
    for (int i = 0; i < 8; i++) x[i] = GROUPS(x[2 * i], x[2 * i + 1], 8, PLUS);
#endif
#if LANES >= 8
    UNROLL
    for (int i = 0; i < 4; i++) x[i] = GROUPS(x[2 * i], x[2 * i + 1], 4, PLUS);
#endif
    UNROLL
    for (int i = 0; i < 2; i++) x[i] = GROUPS(x[2 * i], x[2 * i + 1], 2, PLUS);
    return GROUPS(x[0], x[1], 1, PLUS);
}

INLINE int NAME(reversed)(int i) {
#if LANES == 16
    return (i & 1) << 3 | (i & 2) << 1 | (i & 4) >> 1 | (i & 8) >> 3;
#elif LANES == 8
    return (i & 1) << 2 | (i & 2) | (i & 4) >> 2;
#else
    return (i & 1) << 1 | (i & 2) >> 1;
#endif
}

INLINE float NAME(sum)(VEC x) {
#if LANES == 16
    x = GROUPS(x, x, 8, PLUS);
#endif
#if LANES >= 8
    x = GROUPS(x, x, 4, PLUS);
#endif
    x = GROUPS(x, x, 2, PLUS);
    x = GROUPS(x, x, 1, PLUS);
    return x[0];
}

INLINE float NAME(largest)(VEC x) {
#if LANES == 16
    x = GROUPS(x, x, 8, NAME(larger));
#endif
#if LANES >= 8
    x = GROUPS(x, x, 4, NAME(larger));
#endif
    x = GROUPS(x, x, 2, NAME(larger));
    x = GROUPS(x, x, 1, NAME(larger));
    return x[0];
}

/* e^x, to about an ulp from -87 to 88 and as at these ends beyond; no number for none. 2^n e^r with
 * |r| <= ln 2 / 2: n is rounded by adding a number whose last digit is 1. */
INLINE VEC NAME(exp)(VEC x) {
    x = NAME(choose)((INTS)(x < -87.0f), NAME(all)(-87.0f), x);
    x = NAME(choose)((INTS)(x > 88.0f), NAME(all)(88.0f), x);
    const float round = 12582912.0f; /* 1.5 * 2^23 */
    VEC shifted = NAME(fma)(x, NAME(all)(1.44269504f), NAME(all)(round));
    VEC n = shifted - round;
    /* ln 2 in two parts, the first with so few digits that n times it is exact. */
    VEC r = NAME(fma)(n, NAME(all)(2.12194440e-4f), x - n * 0.693359375f);
    /* Taylor's, to r^7: the rest is below 2^-27. */
    VEC y = NAME(fma)(r, NAME(all)(1.0f / 5040.0f), NAME(all)(1.0f / 720.0f));
    y = NAME(fma)(y, r, NAME(all)(1.0f / 120.0f));
    y = NAME(fma)(y, r, NAME(all)(1.0f / 24.0f));
    y = NAME(fma)(y, r, NAME(all)(1.0f / 6.0f));
    y = NAME(fma)(y, r, NAME(all)(0.5f));
    y = NAME(fma)(y, r, NAME(all)(1.0f));
    y = NAME(fma)(y, r, NAME(all)(1.0f));
    return y * (VEC)(((INTS)shifted - 0x4B400000 + 127) << 23);
}

/* The same of one number, by the same steps. */
INLINE float NAME(exp_of)(float x) { return NAME(exp)(NAME(all)(x))[0]; }

/* y = x / sqrt(mean(x^2) + eps) * weight of one row. */
TARGET static void NAME(rms_norm)(const struct norm *task, int64_t row) {
    const float *x = task->x + row * task->x_stride;
    float *y = task->y + row * task->width;
    const int64_t width = task->width, whole = width - width % LANES;
    VEC sums[4] = {{0}};
    int64_t i = 0;
    for (; i + 4 * LANES <= whole; i += 4 * LANES)
        for (int part = 0; part < 4; part++) {
            VEC of = NAME(load)(x + i + part * LANES);
            sums[part] = NAME(fma)(of, of, sums[part]);
        }
    for (; i < whole; i += LANES)
        sums[0] = NAME(fma)(NAME(load)(x + i), NAME(load)(x + i), sums[0]);
    float sum = NAME(sum)((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < width; i++) sum += x[i] * x[i];
    const float scale = 1.0f / sqrtf(sum / (float)width + task->eps);
    for (i = 0; i < whole; i += LANES)
        NAME(store)(y + i, NAME(load)(x + i) * scale * NAME(load)(task->weight + i));
    for (; i < width; i++) y[i] = x[i] * scale * task->weight[i];
}

/* y = gate * sigmoid(gate) * up of one row, [gate, up] side by side. */
TARGET static void NAME(silu_mul)(const struct gated *task, int64_t row) {
    const int64_t width = task->width;
    const float *gate = task->x + row * task->x_stride, *up = gate + width;
    float *y = task->y + row * width;
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        VEC x = NAME(load)(gate + i);
        NAME(store)(y + i, x / (NAME(exp)(-x) + 1.0f) * NAME(load)(up + i));
    }
    for (; i < width; i++) y[i] = gate[i] / (NAME(exp_of)(-gate[i]) + 1.0f) * up[i];
}

/* Rotates the heads of one row in their place: x * cos + roll(x, D / 2) * sin, the first half of
 * `sin` with the sign. */
TARGET static void NAME(rotate)(const struct rotation *task, int64_t row) {
    const int64_t dim = task->head_dim, half = dim / 2;
    const float *cos = task->cos + row * dim, *sin = task->sin + row * dim;
    for (int64_t head = 0; head < task->num_heads; head++) {
        float *low = task->x + row * task->x_stride + head * dim, *high = low + half;
        int64_t i = 0;
        for (; i + LANES <= half; i += LANES) {
            VEC a = NAME(load)(low + i), b = NAME(load)(high + i);
            NAME(store)(low + i, a * NAME(load)(cos + i) + b * NAME(load)(sin + i));
            NAME(store)(high + i, b * NAME(load)(cos + half + i) + a * NAME(load)(sin + half + i));
        }
        for (; i < half; i++) {
            float a = low[i], b = high[i];
            low[i] = a * cos[i] + b * sin[i];
            high[i] = b * cos[half + i] + a * sin[half + i];
        }
    }
}

/* Finds the `width` largest of a row of logits, the first of equals first, and their log
 * probabilities; for what there is no more, and all of a row with NaN or +inf, column 0 and -inf. */
TARGET static void NAME(likeliest)(const struct choice *task, int64_t row) {
    enum { BLOCK = 64 };
    const float *x = task->x + row * task->x_stride;
    const int64_t size = task->num_columns, whole = size - size % BLOCK, width = task->width;
    int64_t *columns = task->columns + row * width;
    float *found = task->log_probs + row * width;
    for (int64_t i = 0; i < width; i++) columns[i] = 0, found[i] = -INFINITY;
    VEC tops = NAME(all)(-INFINITY);
    INTS bad = {0};
    int64_t i = 0;
    for (; i < whole; i += LANES) {
        VEC of = NAME(load)(x + i);
        tops = NAME(larger)(tops, of);
        bad |= (INTS)(of != of) | (INTS)(of == INFINITY);
    }
    float top = NAME(largest)(tops);
    int is_bad = 0;
    for (int lane = 0; lane < LANES; lane++) is_bad |= bad[lane];
    for (; i < size; i++) {
        is_bad |= x[i] != x[i] || x[i] == INFINITY;
        if (x[i] > top) top = x[i];
    }
    if (is_bad || top == -INFINITY) return;
    VEC sums = {0};
    float sum = 0.0f;
    for (int64_t start = 0; start < size; start += BLOCK) {
        const int64_t end = start + BLOCK < size ? start + BLOCK : size;
        if (start < whole) {
            VEC best = NAME(all)(-INFINITY);
            for (i = start; i < end; i += LANES) {
                VEC of = NAME(load)(x + i);
                best = NAME(larger)(best, of);
                sums += NAME(exp)(of - top);
            }
            if (!(NAME(largest)(best) > found[width - 1])) continue;
        }
        for (i = start; i < end; i++) {
            if (start >= whole) sum += NAME(exp_of)(x[i] - top);
            if (!(x[i] > found[width - 1])) continue;
            int64_t place = width - 1;
            for (; place > 0 && x[i] > found[place - 1]; place--) {
                found[place] = found[place - 1];
                columns[place] = columns[place - 1];
            }
            found[place] = x[i];
            columns[place] = i;
        }
    }
    const float norm = top + logf(sum + NAME(sum)(sums));
    for (i = 0; i < width; i++) found[i] -= norm;
}

/* --- attention */

/* What a query head of a row has of the keys so far. */
struct NAME(state) {
    float largest;         /* score */
    VEC sums;              /* by lane, of e^(score - largest) */
    float values[MAX_DIM]; /* their sum, weighted so */
};

/* Keys and values that follow each other in a text. */
struct NAME(span) {
    const float *keys[SPAN], *values[SPAN];
};

/* The products of a query with LANES keys. */
INLINE VEC NAME(products)(const float *query, const float *const *keys, int dim) {
    VEC sums[LANES];
    UNROLL
    for (int i = 0; i < LANES; i++) sums[i] = (VEC){0};
    for (int at = 0; at < dim; at += LANES) {
        VEC part = NAME(load)(query + at);
        UNROLL
        for (int i = 0; i < LANES; i++) {
            VEC *sum = &sums[NAME(reversed)(i)];
            *sum = NAME(fma)(part, NAME(load)(keys[i] + at), *sum);
        }
    }
    return NAME(sums)(sums);
}

/* Adds weighted values to the sums of `count` heads, `parts` vectors of them from `at` on. */
INLINE void NAME(add_values)(
    struct NAME(state) *states, const VEC (*weights)[SPAN / LANES], const float *scales, int count,
    int parts, const float *const *values, int at, int first, int end
) {
    VEC sums[MAX_TOGETHER][4];
    UNROLL
    for (int q = 0; q < count; q++)
        UNROLL
        for (int part = 0; part < parts; part++)
            sums[q][part] = NAME(load)(states[q].values + at + part * LANES) * scales[q];
    for (int i = first; i < end; i++)
        UNROLL
        for (int part = 0; part < parts; part++) {
            VEC value = NAME(load)(values[i] + at + part * LANES);
            UNROLL
            for (int q = 0; q < count; q++)
                sums[q][part] = NAME(fma)(
                    NAME(all)(((const float *)weights[q])[i]), value, sums[q][part]
                );
        }
    UNROLL
    for (int q = 0; q < count; q++)
        UNROLL
        for (int part = 0; part < parts; part++)
            NAME(store)(states[q].values + at + part * LANES, sums[q][part]);
}

/* Goes on with `count` query heads of a row over a span of keys, of which it sees those from
 * `first` to `end`. Vectors of keys that it sees in part have valid keys beside. */
INLINE void NAME(take_span)(
    struct NAME(state) *states, const float *query, const struct NAME(span) *span, int count,
    int dim, int value_dim, float scale, int first, int end
) {
    VEC weights[MAX_TOGETHER][SPAN / LANES];
    float scales[MAX_TOGETHER];
    INTS lanes;
    for (int i = 0; i < LANES; i++) lanes[i] = i;
    const int from = first / LANES, to = (end + LANES - 1) / LANES;
    VEC tops[MAX_TOGETHER];
    for (int q = 0; q < count; q++) tops[q] = NAME(all)(states[q].largest);
    for (int i = from; i < to; i++) {
        const INTS seen = (INTS)(lanes >= first - i * LANES) & (INTS)(lanes < end - i * LANES);
        for (int q = 0; q < count; q++) {
            VEC scores = NAME(products)(query + q * dim, span->keys + i * LANES, dim) * scale;
            weights[q][i] = NAME(choose)(seen, scores, NAME(all)(-INFINITY));
            tops[q] = NAME(larger)(tops[q], weights[q][i]);
        }
    }
    for (int q = 0; q < count; q++) {
        const float largest = NAME(largest)(tops[q]);
        VEC sums = {0};
        for (int i = from; i < to; i++) {
            const INTS seen = (INTS)(lanes >= first - i * LANES) & (INTS)(lanes < end - i * LANES);
            weights[q][i] = (VEC)((INTS)NAME(exp)(weights[q][i] - largest) & seen);
            sums += weights[q][i];
        }
        scales[q] = NAME(exp_of)(states[q].largest - largest);
        states[q].largest = largest;
        states[q].sums = states[q].sums * scales[q] + sums;
    }
    int at = 0;
    for (; at + 4 * LANES <= value_dim; at += 4 * LANES)
        NAME(add_values)(states, weights, scales, count, 4, span->values, at, first, end);
    for (; at < value_dim; at += LANES)
        NAME(add_values)(states, weights, scales, count, 1, span->values, at, first, end);
}

/* Finds a row's keys of a span from number `done` to `end`, and for the rest of the vectors. */
INLINE void NAME(find)(
    const struct attention *task, const int64_t *row, int64_t kv_head, int64_t start, int done,
    int end, struct NAME(span) *span
) {
    const float *keys = task->pool + kv_head * task->head_dim;
    const float *values = task->pool + task->num_kv_heads * task->head_dim
        + kv_head * task->value_dim;
    for (int i = done; i < end; i++) {
        const int64_t key = start + i, own = key - row[OWN_FROM];
        const int64_t at = own < 0 ? row[FIRST_KEY] + key : row[FIRST_OWN] + own;
        const int64_t place = task->slots[at] * task->slot_stride;
        span->keys[i] = keys + place;
        span->values[i] = values + place;
    }
    for (int i = end; i % LANES; i++) span->keys[i] = span->keys[end - 1];
}

/* Attends for one key head of a tile: rows of the same keys. */
TARGET static void NAME(attend)(const struct attention *task, int64_t item) {
    const int64_t kv_head = item % task->num_kv_heads;
    const int64_t *tile = task->tiles + item / task->num_kv_heads * 2;
    const int64_t *rows = task->rows + tile[0] * ROW_FIELDS;
    const int64_t num_rows = tile[1];
    const int dim = (int)task->head_dim, value_dim = (int)task->value_dim;
    const int fold = (int)(task->num_heads / task->num_kv_heads);
    struct NAME(state) states[MAX_ROWS][MAX_FOLD];
    struct NAME(span) shared, own;
    int64_t start = INT64_MAX, end = 0;
    for (int64_t r = 0; r < num_rows; r++) {
        const int64_t *row = rows + r * ROW_FIELDS, first = first_seen(row, task->window);
        if (row[NUM_KEYS] > end) end = row[NUM_KEYS];
        if (first < start) start = first;
        for (int q = 0; q < fold; q++) {
            states[r][q].largest = -INFINITY;
            states[r][q].sums = (VEC){0};
            for (int i = 0; i < value_dim; i += LANES)
                NAME(store)(states[r][q].values + i, (VEC){0});
        }
    }
    for (start -= start % SPAN; start < end; start += SPAN) {
        int found = 0; /* keys in `shared` */
        for (int64_t r = 0; r < num_rows; r++) {
            const int64_t *row = rows + r * ROW_FIELDS;
            const int64_t from = first_seen(row, task->window) - start;
            const int64_t to = row[NUM_KEYS] - start;
            if (to <= 0 || from >= SPAN) continue;
            const int first = from < 0 ? 0 : (int)from, last = to > SPAN ? SPAN : (int)to;
            struct NAME(span) *span = &shared;
            if (row[OWN_FROM] < start + last) {
                span = &own;
                NAME(find)(task, row, kv_head, start, 0, last, span);
            } else if (found < last) {
                NAME(find)(task, row, kv_head, start, found, last, span);
                found = last;
            }
            const float *query = task->query + (tile[0] + r) * task->query_stride
                + kv_head * fold * dim;
            struct NAME(state) *of = states[r];
#define TAKE(n)                                                                                    \
    if (dim == 64 && value_dim == 64)                                                              \
        NAME(take_span)(of + q, query + q * 64, span, n, 64, 64, task->scale, first, last);        \
    else                                                                                           \
        NAME(take_span)(of + q, query + q * dim, span, n, dim, value_dim, task->scale, first, last)
            int q = 0;
            for (; q + 4 <= fold; q += 4) { TAKE(4); }
            if (fold - q == 3) { TAKE(3); }
            else if (fold - q == 2) { TAKE(2); }
            else if (fold - q == 1) { TAKE(1); }
#undef TAKE
        }
    }
    for (int64_t r = 0; r < num_rows; r++)
        for (int q = 0; q < fold; q++) {
            float *out = task->out
                + ((tile[0] + r) * task->num_heads + kv_head * fold + q) * value_dim;
            const float scale = 1.0f / NAME(sum)(states[r][q].sums);
            for (int i = 0; i < value_dim; i += LANES)
                NAME(store)(out + i, NAME(load)(states[r][q].values + i) * scale);
        }
}

/* --- matrix products */

#ifdef HALF
/* PANEL columns of `count` rows of y = x W^T * scale + bias + residual, from row `first` on. Each
 * is a sum of sums over CHUNK inputs, one after another. */
INLINE void NAME(multiply)(
    const struct product *task, int64_t panel, int64_t first, int count, int in_bytes
) {
    enum { PARTS = PANEL / LANES };
    const int64_t size = task->in_features;
    const uint16_t *halves = (const uint16_t *)task->weight + panel * size * PANEL;
    const int8_t *bytes = (const int8_t *)task->weight + panel * size * PANEL;
    const float *x = task->x + first * task->x_stride;
    VEC totals[MOST_ROWS][PARTS];
    UNROLL
    for (int r = 0; r < count; r++)
        UNROLL
        for (int part = 0; part < PARTS; part++) totals[r][part] = (VEC){0};
    for (int64_t i = 0; i < size;) {
        const int64_t end = i + CHUNK < size ? i + CHUNK : size;
        VEC sums[MOST_ROWS][PARTS];
        UNROLL
        for (int r = 0; r < count; r++)
            UNROLL
            for (int part = 0; part < PARTS; part++) sums[r][part] = (VEC){0};
        for (; i < end; i++) {
            VEC weights[PARTS];
            if (in_bytes)
                __builtin_prefetch(bytes + (i + AHEAD) * PANEL);
            else
                __builtin_prefetch(halves + (i + AHEAD) * PANEL);
            UNROLL
            for (int part = 0; part < PARTS; part++)
                weights[part] = in_bytes ? BYTES(bytes + i * PANEL + part * LANES)
                                         : HALF(halves + i * PANEL + part * LANES);
            UNROLL
            for (int r = 0; r < count; r++) {
                VEC input = NAME(all)(x[r * task->x_stride + i]);
                UNROLL
                for (int part = 0; part < PARTS; part++)
                    sums[r][part] = NAME(fma)(input, weights[part], sums[r][part]);
            }
        }
        UNROLL
        for (int r = 0; r < count; r++)
            UNROLL
            for (int part = 0; part < PARTS; part++)
                totals[r][part] += sums[r][part];
    }
    const int64_t start = panel * PANEL;
    const int64_t num_columns = task->out_features - start < PANEL ? task->out_features - start : PANEL;
    UNROLL
    for (int r = 0; r < count; r++) {
        const int64_t at = (first + r) * task->out_features + start;
        float columns[PANEL];
        float *y = num_columns < PANEL ? columns : task->y + at;
        UNROLL
        for (int part = 0; part < PARTS; part++) {
            VEC sum = totals[r][part] * task->scale;
            if (num_columns == PANEL) {
                if (in_bytes) sum *= NAME(load)(task->scales + start + part * LANES);
                if (task->bias) sum += NAME(load)(task->bias + start + part * LANES);
                if (task->residual) sum += NAME(load)(task->residual + at + part * LANES);
            }
            NAME(store)(y + part * LANES, sum);
        }
        if (num_columns < PANEL)
            for (int64_t i = 0; i < num_columns; i++) {
                float sum = in_bytes ? columns[i] * task->scales[start + i] : columns[i];
                if (task->bias) sum += task->bias[start + i];
                if (task->residual) sum += task->residual[at + i];
                task->y[at + i] = sum;
            }
    }
}

INLINE void
NAME(multiply_all)(const struct product *task, int64_t panel, int64_t row, int64_t end, int in_bytes) {
    for (; row + MOST_ROWS <= end; row += MOST_ROWS)
        NAME(multiply)(task, panel, row, MOST_ROWS, in_bytes);
    switch (end - row) {
#define CASE(n) case n: NAME(multiply)(task, panel, row, n, in_bytes); break;
#if MOST_ROWS > 3
    CASE(11) CASE(10) CASE(9) CASE(8) CASE(7) CASE(6) CASE(5) CASE(4) CASE(3)
#endif
    CASE(2) CASE(1)
#undef CASE
    }
}

TARGET static void NAME(product)(const struct product *task, int64_t item) {
    const int64_t panel = item % task->num_panels, row = item / task->num_panels * BLOCK_ROWS;
    const int64_t end = row + BLOCK_ROWS < task->num_rows ? row + BLOCK_ROWS : task->num_rows;
    if (task->scales)
        NAME(multiply_all)(task, panel, row, end, 1);
    else
        NAME(multiply_all)(task, panel, row, end, 0);
}
#define PRODUCT NAME(product)
#else
#define PRODUCT NULL
#endif

static const struct kernels NAME(kernels) = {
    LANES, NAME(likeliest), NAME(rms_norm), NAME(silu_mul), NAME(rotate), NAME(attend), PRODUCT
};

#undef VEC
#undef INTS
#undef INLINE
#undef AT
#undef LIST
#undef GROUPS
#undef PICKED
#undef PLUS
#undef PRODUCT
#undef TARGET
#undef LANES
#undef NAME
#undef FMA
#undef LARGER
#undef HALF
#undef BYTES
#undef MOST_ROWS
