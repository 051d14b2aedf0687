/* Gathers or scatters runs of pieces of any length: compiled by NVRTC when a process first uses a GPU (cuda.py). Few
 * thread blocks on purpose: they share the GPU with the model. Each thread block takes an equal share of the pieces,
 * reads the runs that they are in from pinned host memory a tile at a time, works out where the pieces are, and gives
 * each to `lanes` neighbouring threads. */

struct run { /* as gpu_copy.h says */
    unsigned long long source, destination, source_step, destination_step;
    unsigned int bytes, rows, first, reserved;
};

#define RUNS 512u
#define PIECES 1024u
#define RUN_WORDS 6u

struct pieces {
    unsigned long long sources[PIECES], destinations[PIECES];
    unsigned int bytes[PIECES];
};

/* Pieces of at most 16 bytes a thread: four of them at once, or a thread would wait for one load at a time. */
__device__ void copy_short(const pieces *all, unsigned int count, unsigned int group, unsigned int groups, unsigned int lane)
{
    for (unsigned int i = group; i < count; i += 4 * groups) {
        uint4 loaded[4];
        for (unsigned int k = 0; k < 4; k++) {
            unsigned int at = i + k * groups;
            if (at < count && lane * 16 < all->bytes[at]) loaded[k] = reinterpret_cast<const uint4 *>(all->sources[at])[lane];
        }
        for (unsigned int k = 0; k < 4; k++) {
            unsigned int at = i + k * groups;
            if (at < count && lane * 16 < all->bytes[at]) reinterpret_cast<uint4 *>(all->destinations[at])[lane] = loaded[k];
        }
    }
}

template <typename Word>
__device__ void copy(unsigned long long destination, unsigned long long source, unsigned int bytes, unsigned int lane, unsigned int lanes)
{
    const Word *from = reinterpret_cast<const Word *>(source);
    Word *to = reinterpret_cast<Word *>(destination);
    unsigned int count = bytes / sizeof(Word), at = lane;
    for (; at + 3 * lanes < count; at += 4 * lanes) { /* four loads under way a thread */
        Word a = from[at], b = from[at + lanes], c = from[at + 2 * lanes], d = from[at + 3 * lanes];
        to[at] = a;
        to[at + lanes] = b;
        to[at + 2 * lanes] = c;
        to[at + 3 * lanes] = d;
    }
    for (; at < count; at += lanes) to[at] = from[at];
}

__device__ void copy_all(const pieces *all, unsigned int count, unsigned int group, unsigned int groups, unsigned int lane, unsigned int lanes)
{
    for (unsigned int i = group; i < count; i += groups) {
        unsigned long long source = all->sources[i], destination = all->destinations[i];
        unsigned int bytes = all->bytes[i];
        unsigned long long alignment = source | destination | bytes;
        if (alignment % 16 == 0)
            copy<uint4>(destination, source, bytes, lane, lanes);
        else if (alignment % 4 == 0)
            copy<unsigned int>(destination, source, bytes, lane, lanes);
        else
            copy<unsigned char>(destination, source, bytes, lane, lanes);
    }
}

/* Each thread works out some of the pieces number `number` and up. Whether all of those are for copy_short. */
__device__ int expand(pieces *all, const run *runs, unsigned int run_count, unsigned int number, unsigned int count, unsigned int lanes)
{
    int is_short = 1;
    for (unsigned int i = threadIdx.x; i < count; i += blockDim.x) {
        unsigned int low = 0, high = run_count; /* the last run that begins at this piece or before it */
        while (high - low > 1) {
            unsigned int middle = (low + high) / 2;
            if (runs[middle].first <= number + i)
                low = middle;
            else
                high = middle;
        }
        const run *of = &runs[low];
        unsigned long long row = number + i - of->first;
        unsigned long long source = of->source + row * of->source_step, destination = of->destination + row * of->destination_step;
        all->sources[i] = source;
        all->destinations[i] = destination;
        all->bytes[i] = of->bytes;
        is_short &= of->bytes <= 16 * lanes && (source | destination | of->bytes) % 16 == 0;
    }
    return is_short;
}

extern "C" __global__ void __launch_bounds__(1024) railrelay_gather(const run *list, unsigned int count, unsigned int piece_count, unsigned int lanes)
{
    __shared__ run runs[RUNS];
    __shared__ pieces all;
    unsigned int group = threadIdx.x / lanes, lane = threadIdx.x % lanes, groups = blockDim.x / lanes;
    unsigned int at = (unsigned int)((unsigned long long)piece_count * blockIdx.x / gridDim.x);
    unsigned int last = (unsigned int)((unsigned long long)piece_count * (blockIdx.x + 1) / gridDim.x);
    /* Where the first piece's run is, is a guess, right but for one where all runs are of one length. */
    unsigned int low = 0, high = count, base = (unsigned int)((unsigned long long)count * blockIdx.x / gridDim.x);
    if (base) base--;
    while (at < last) {
        unsigned int size = min(RUNS, count - base);
        /* The CPU wrote the list just now: read it past any cache. */
        const volatile unsigned long long *words = reinterpret_cast<const volatile unsigned long long *>(list + base);
        unsigned long long *copies = reinterpret_cast<unsigned long long *>(runs);
        for (unsigned int i = threadIdx.x; i < size * RUN_WORDS; i += blockDim.x) copies[i] = words[i];
        __syncthreads();
        unsigned int end = runs[size - 1].first + runs[size - 1].rows, begin = runs[0].first;
        if (at < begin || at >= end) { /* between low and high it is */
            if (at < begin)
                high = base;
            else
                low = base + size;
            base = low + (high - low) / 2;
            __syncthreads();
            continue;
        }
        for (end = min(end, last); at < end;) {
            unsigned int some = min(PIECES, end - at);
            if (__syncthreads_and(expand(&all, runs, size, at, some, lanes)))
                copy_short(&all, some, group, groups, lane);
            else
                copy_all(&all, some, group, groups, lane, lanes);
            at += some;
            __syncthreads();
        }
        base = low = base + size;
        high = count;
    }
}
