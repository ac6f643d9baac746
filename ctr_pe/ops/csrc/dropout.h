/* Which entries dropout keeps: ops/dropout.py says it in torch. Four numbers of 16 bits from each of 64, which
   is a hash of the seed and its index (Steele et al. 2014, "Fast splittable pseudorandom number generators"). */

typedef uint64_t Longs __attribute__((vector_size(4 * LANES)));
typedef int16_t Shorts __attribute__((vector_size(4 * LANES)));

/* Entries 4 from, ..., 4 to - 1 of so many: 1 where the number reaches `least`, else 0. */
static void keep_numbers(uint64_t seed, int64_t from, int64_t to, int64_t count, int16_t least, int16_t *kept) {
    for (int64_t i = from; i < to; i += LANES / 2) {
        Longs x;
        for (int v = 0; v < LANES / 2; v++) x[v] = i + v + 1;
        x = seed + x * 0x9e3779b97f4a7c15u;
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
        x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
        x ^= x >> 31;
        const Shorts are = ((Shorts)x >= least) & 1;
        const int64_t left = (4 * to < count ? 4 * to : count) - 4 * i;
        memcpy(kept + 4 * i, &are, sizeof(int16_t) * (left < 2 * LANES ? left : 2 * LANES));
    }
}
