/* gather.cu on the CPU: a thread for each of the GPU's, one thread block after the other. KERNEL names the source, which
 * a test may have given smaller tiles. */
#include <cstdint>
#include <pthread.h>
#include <thread>
#include <vector>

struct dimensions {
    unsigned int x;
};
struct alignas(16) uint4 {
    unsigned int x, y, z, w;
};

static thread_local dimensions threadIdx, blockIdx;
static dimensions blockDim, gridDim;
static pthread_barrier_t barrier;
static int votes_against;

static void __syncthreads() { pthread_barrier_wait(&barrier); }

static int __syncthreads_and(int vote)
{
    if (!vote) __atomic_store_n(&votes_against, 1, __ATOMIC_RELAXED);
    pthread_barrier_wait(&barrier);
    int all = !__atomic_load_n(&votes_against, __ATOMIC_RELAXED);
    pthread_barrier_wait(&barrier);
    if (threadIdx.x == 0) votes_against = 0;
    pthread_barrier_wait(&barrier);
    return all;
}

template <typename T> static T min(T a, T b) { return a < b ? a : b; }

#define __device__ static
#define __global__ __attribute__((visibility("default")))
#define __launch_bounds__(threads)
#define __shared__ static

#include KERNEL

extern "C" __attribute__((visibility("default"))) void launch(const run *list, unsigned int count, unsigned int piece_count, unsigned int lanes,
                                                              unsigned int blocks, unsigned int threads)
{
    gridDim.x = blocks;
    blockDim.x = threads;
    for (unsigned int block = 0; block < blocks; block++) {
        pthread_barrier_init(&barrier, nullptr, threads);
        std::vector<std::thread> running;
        for (unsigned int number = 0; number < threads; number++)
            running.emplace_back([=] {
                threadIdx.x = number;
                blockIdx.x = block;
                railrelay_gather(list, count, piece_count, lanes);
            });
        for (std::thread &thread : running) thread.join();
        pthread_barrier_destroy(&barrier);
    }
}
