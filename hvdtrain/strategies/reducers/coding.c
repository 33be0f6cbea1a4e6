/* The inner loops of int8, int4, int2 and bf16: the operations of `quantize` and `bfloat16`, in the same order, so with the
   same bits. `compiled` builds this without contraction, which would round a product and a sum only once. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GLIBC__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

enum { LENGTH = 64, FIVES = 13 }; /* of 65 numbers, of which a block's last one is not used */
enum { SET, ADD, SUBTRACT };
static const float TINY = 1.5e-36f;

static inline uint16_t to_bf16(uint32_t number)
{
    const uint32_t rounded = (number + 0x7fff + (number >> 16 & 1)) >> 16;
    /* NaN is special, because the carry would turn some into numbers */
    return (number & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded;
}

static inline float from_bf16(uint16_t half)
{
    const uint32_t number = (uint32_t)half << 16;
    float value;
    memcpy(&value, &number, sizeof value);
    return value;
}

/* `size` numbers in `blocks` blocks; the missing ones are 0. */
FOR_EACH_PROCESSOR
void encode_integers(const float *values, int64_t size, int64_t blocks, int bits, uint16_t *scales, uint8_t *message)
{
    const float top = (1 << (bits - 1)) - 1;
    float last[LENGTH] = {0};
    int8_t whole[LENGTH + 4] = {0};
    for (int64_t block = 0; block < blocks; block++, values += LENGTH, size -= LENGTH) {
        const float *some = values;
        if (size < LENGTH) {
            memset(last, 0, sizeof last);
            if (size > 0)
                memcpy(last, values, size * sizeof *last);
            some = last;
        }
        int32_t pattern[LENGTH], most = 0;
        memcpy(pattern, some, sizeof pattern);
        for (int i = 0; i < LENGTH; i++) { /* as integers, magnitudes are in order, infinity and NaN last */
            const int32_t magnitude = pattern[i] & 0x7fffffff;
            most = magnitude > most ? magnitude : most;
        }
        float largest;
        memcpy(&largest, &most, sizeof largest);
        if (largest < TINY)
            largest = 0;
        const float exact = largest * (1 / top);
        memcpy(&most, &exact, sizeof most);
        scales[block] = to_bf16(most);
        const float scale = from_bf16(scales[block]), factor = scale == 0 ? 0 : 1 / scale;
        for (int i = 0; i < LENGTH; i++)
            whole[i] = (int8_t)(int32_t)rintf(some[i] * factor);
        if (bits == 8) {
            memcpy(message, whole, LENGTH);
            message += LENGTH;
        } else if (bits == 4) {
            for (int i = 0; i < LENGTH / 2; i++)
                message[i] = (whole[2 * i] & 15) | (uint8_t)(whole[2 * i + 1] << 4);
            message += LENGTH / 2;
        } else {
            /* Byte i holds the numbers i, i + 13 ... as the first five digits in base 3 of byte / 256. The last three of
               16 bytes are not used, but 16 vectorize. */
            uint8_t fives[16];
            for (int i = 0; i < 16; i++) {
                int8_t five = whole[i];
                for (int k = 1; k < 5; k++)
                    five = 3 * five + whole[FIVES * k + i];
                const uint16_t value = five + 121;
                fives[i] = value + ((55 * value + 1008) >> 10); /* value / 243, nearly, and never less */
            }
            memcpy(message, fives, FIVES);
            message += FIVES;
        }
    }
}

static inline void combine(float *values, const int8_t *whole, float scale, int size, int how)
{
    if (how == ADD)
        for (int i = 0; i < size; i++)
            values[i] += whole[i] * scale;
    else if (how == SUBTRACT)
        for (int i = 0; i < size; i++)
            values[i] -= whole[i] * scale;
    else
        for (int i = 0; i < size; i++)
            values[i] = whole[i] * scale;
}

FOR_EACH_PROCESSOR
void decode_integers(const uint16_t *scales, const uint8_t *message, int64_t size, int bits, int how, float *values)
{
    int8_t whole[LENGTH + 4] = {0};
    for (int64_t block = 0; size > 0; block++, values += LENGTH, size -= LENGTH) {
        const int present = size < LENGTH ? size : LENGTH;
        if (bits == 8) {
            memcpy(whole, message, LENGTH);
            message += LENGTH;
        } else if (bits == 4) {
            for (int i = 0; i < LENGTH / 2; i++) {
                whole[2 * i] = (int8_t)(message[i] << 4) >> 4;
                whole[2 * i + 1] = (int8_t)message[i] >> 4;
            }
            message += LENGTH / 2;
        } else {
            uint8_t fives[16] = {0};
            memcpy(fives, message, FIVES);
            for (int k = 0; k < 5; k++)
                for (int i = 0; i < 16; i++) { /* the last three are overwritten by the next k */
                    const uint16_t digit = 3 * fives[i];
                    whole[FIVES * k + i] = (digit >> 8) - 1;
                    fives[i] = digit;
                }
            message += FIVES;
        }
        const float scale = from_bf16(scales[block]);
        if (present == LENGTH)
            combine(values, whole, scale, LENGTH, how);
        else
            combine(values, whole, scale, present, how);
    }
}

FOR_EACH_PROCESSOR
void encode_bf16(const uint32_t *values, int64_t size, uint16_t *message)
{
    for (int64_t i = 0; i < size; i++)
        message[i] = to_bf16(values[i]);
}

FOR_EACH_PROCESSOR
void decode_bf16(const uint16_t *message, int64_t size, int how, float *values)
{
    for (int64_t i = 0; i < size; i++) {
        const float value = from_bf16(message[i]);
        values[i] = how == ADD ? values[i] + value : value;
    }
}

static inline void add_some(
    const float *p, const float *q, int64_t rank, int64_t rows, int64_t columns, int size, float *out)
{
    float sums[LENGTH] = {0};
    for (int64_t i = 0; i < rank; i++)
        for (int k = 0; k < size; k++)
            sums[k] += p[i * rows] * q[i * columns + k];
    memcpy(out, sums, size * sizeof *sums);
}

/* out[row][column] = sum of p[i][row] * q[i][column] over i, whose terms are rounded and added one by one. */
FOR_EACH_PROCESSOR
void add_products(const float *p, const float *q, int64_t rank, int64_t rows, int64_t columns, float *out)
{
    for (int64_t begin = 0; begin < columns; begin += LENGTH) { /* a piece of q stays in the cache */
        const int64_t left = columns - begin;
        for (int64_t row = 0; row < rows; row++)
            if (left >= LENGTH)
                add_some(p + row, q + begin, rank, rows, columns, LENGTH, out + row * columns + begin);
            else
                add_some(p + row, q + begin, rank, rows, columns, left, out + row * columns + begin);
    }
}
