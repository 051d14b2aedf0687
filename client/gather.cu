/* Gathers or scatters pieces of any length: compiled by NVRTC when a process first uses a GPU (cuda.py). Few thread
 * blocks on purpose: they share the GPU with the model. Each thread block takes an equal share of the pieces, reads
 * their descriptions from pinned host memory a tile at a time, and gives each piece to `lanes` neighbouring threads. */

struct piece {
    unsigned long long source, destination;
    unsigned int bytes, reserved;
};

#define TILE 1024u

/* Pieces of at most 16 bytes a thread: four of them at once, or a thread would wait for one load at a time. */
__device__ void copy_short(const piece *pieces, unsigned int count, unsigned int group, unsigned int groups, unsigned int lane)
{
    for (unsigned int i = group; i < count; i += 4 * groups) {
        uint4 loaded[4];
        for (unsigned int k = 0; k < 4; k++) {
            unsigned int at = i + k * groups;
            if (at < count && lane * 16 < pieces[at].bytes) loaded[k] = reinterpret_cast<const uint4 *>(pieces[at].source)[lane];
        }
        for (unsigned int k = 0; k < 4; k++) {
            unsigned int at = i + k * groups;
            if (at < count && lane * 16 < pieces[at].bytes) reinterpret_cast<uint4 *>(pieces[at].destination)[lane] = loaded[k];
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

extern "C" __global__ void __launch_bounds__(1024) railrelay_gather(const piece *pieces, unsigned int count, unsigned int lanes)
{
    __shared__ piece tile[TILE];
    unsigned int group = threadIdx.x / lanes, lane = threadIdx.x % lanes, groups = blockDim.x / lanes;
    unsigned int first = (unsigned int)((unsigned long long)count * blockIdx.x / gridDim.x);
    unsigned int last = (unsigned int)((unsigned long long)count * (blockIdx.x + 1) / gridDim.x);
    for (unsigned int base = first; base < last; base += TILE) {
        unsigned int size = min(TILE, last - base);
        /* The CPU wrote the list just now: read it past any cache. */
        const volatile unsigned long long *words = reinterpret_cast<const volatile unsigned long long *>(pieces + base);
        unsigned long long *copies = reinterpret_cast<unsigned long long *>(tile);
        for (unsigned int i = threadIdx.x; i < size * 3; i += blockDim.x) copies[i] = words[i];
        __syncthreads();
        int is_short = 1;
        for (unsigned int i = threadIdx.x; i < size; i += blockDim.x)
            is_short &= tile[i].bytes <= 16 * lanes && (tile[i].source | tile[i].destination | tile[i].bytes) % 16 == 0;
        if (__syncthreads_and(is_short)) {
            copy_short(tile, size, group, groups, lane);
            __syncthreads();
            continue;
        }
        for (unsigned int i = group; i < size; i += groups) {
            piece p = tile[i];
            unsigned long long alignment = p.source | p.destination | p.bytes;
            if (alignment % 16 == 0)
                copy<uint4>(p.destination, p.source, p.bytes, lane, lanes);
            else if (alignment % 4 == 0)
                copy<unsigned int>(p.destination, p.source, p.bytes, lane, lanes);
            else
                copy<unsigned char>(p.destination, p.source, p.bytes, lane, lanes);
        }
        __syncthreads();
    }
}
