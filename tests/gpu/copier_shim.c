/* gpu_copy.c for Python: copiers by number of bytes, on memory of the test. */
#include "gpu_copy.h"

#include <stdlib.h>
#include <string.h>

#define EXPORTED __attribute__((visibility("default")))

struct shim {
    struct rg_api api;
    struct rg_copier copier;
};

EXPORTED struct shim *shim_open(const uint64_t *functions, uint32_t count, void *context, void *stream, void *kernel, void *lists,
                                uint32_t list_count, uint32_t list_runs, int32_t forced);
EXPORTED struct shim *shim_open(const uint64_t *functions, uint32_t count, void *context, void *stream, void *kernel, void *lists,
                                uint32_t list_count, uint32_t list_runs, int32_t forced)
{
    struct shim *shim = calloc(1, sizeof *shim);
    if (!shim || count * sizeof(void *) != sizeof shim->api) return NULL;
    for (uint32_t i = 0; i < count; i++) {
        void *function = (void *)(uintptr_t)functions[i];
        memcpy((char *)&shim->api + i * sizeof function, &function, sizeof function);
    }
    if (rg_open(&shim->copier, &shim->api, context, stream, kernel, lists, list_count, list_runs)) return NULL;
    shim->copier.forced = forced;
    return shim;
}

EXPORTED void shim_close(struct shim *shim);
EXPORTED void shim_close(struct shim *shim)
{
    rg_close(&shim->copier);
    free(shim);
}

EXPORTED int shim_enter(struct shim *shim);
EXPORTED int shim_enter(struct shim *shim) { return rg_enter(&shim->copier); }

/* Adds runs (six numbers each: source, destination, their steps, bytes, rows) to the list; how many it then has. */
EXPORTED uint32_t shim_put(struct shim *shim, uint32_t list, uint32_t count, const uint64_t *runs);
EXPORTED uint32_t shim_put(struct shim *shim, uint32_t list, uint32_t count, const uint64_t *runs)
{
    struct rg_listing listing = rg_list(&shim->copier, list);
    for (uint32_t i = 0; i < count; i++) {
        const uint64_t *r = runs + 6 * i;
        if (!rg_add(&listing, (struct rg_run){r[0], r[1], r[2], r[3], (uint32_t)r[4], (uint32_t)r[5], 0, 0})) break;
    }
    return listing.count;
}

EXPORTED int shim_copy(struct shim *shim, uint32_t list, uint32_t count);
EXPORTED int shim_copy(struct shim *shim, uint32_t list, uint32_t count) { return rg_copy(&shim->copier, list, count); }

EXPORTED int shim_signal(struct shim *shim, uint64_t address, uint64_t value);
EXPORTED int shim_signal(struct shim *shim, uint64_t address, uint64_t value) { return rg_signal(&shim->copier, address, value); }

EXPORTED int shim_calibrate(struct shim *shim, uint64_t source, uint64_t destination, double nic_rate);
EXPORTED int shim_calibrate(struct shim *shim, uint64_t source, uint64_t destination, double nic_rate)
{
    return rg_calibrate(&shim->copier, source, destination, nic_rate);
}

EXPORTED void shim_set_costs(struct shim *shim, const double *costs);
EXPORTED void shim_set_costs(struct shim *shim, const double *costs)
{
    shim->copier.costs = (struct rg_costs){costs[0], costs[1], costs[2], costs[3], costs[4], costs[5], costs[6], costs[7]};
}

EXPORTED void shim_costs(const struct shim *shim, double *costs);
EXPORTED void shim_costs(const struct shim *shim, double *costs)
{
    const struct rg_costs *c = &shim->copier.costs;
    const double all[] = {c->strided_ns, c->row_ns, c->batched_ns, c->kernel_ns, c->kernel_piece_ns, c->engine_rate, c->kernel_rate, c->nic_rate};
    memcpy(costs, all, sizeof all);
}

/* operations, pieces, bytes of each way */
EXPORTED void shim_counters(const struct shim *shim, uint64_t *out);
EXPORTED void shim_counters(const struct shim *shim, uint64_t *out) { memcpy(out, &shim->copier.counters, sizeof shim->copier.counters); }

EXPORTED const char *shim_error_name(const struct shim *shim, int result);
EXPORTED const char *shim_error_name(const struct shim *shim, int result) { return rg_error_name(&shim->api, result); }
