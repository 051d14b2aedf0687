#include "grants.h"

#include "window.h"

void rr_grants_park(struct rr_rail *rail, struct rr_grants *grants, struct rr_connection *connection, struct rr_work *work)
{
    grants->parked_count++;
    work->state = RR_WORK_PARKED;
    work->connection = connection;
    work->sequence = ++grants->next_want;
    work->parked_ns = rr_now_ns();
    work->next = grants->parked;
    grants->parked = work;
    rr_count(rail, RR_RAIL_GRANT_WAITS, 1);
}

static struct rr_work *unpark(struct rr_grants *grants, uint64_t want)
{
    for (struct rr_work **link = &grants->parked; *link; link = &(*link)->next) {
        struct rr_work *work = *link;
        if (work->sequence != want) continue;
        *link = work->next;
        work->next = NULL;
        grants->parked_count--;
        return work;
    }
    return NULL;
}

int rr_grants_answer(struct rr_rail *rail, struct rr_grants *grants, uint64_t want, uint32_t code, const struct rr_grant *grant)
{
    struct rr_work *work = unpark(grants, want);
    if (!work) {
        /* Given up meanwhile. */
        if (want == 0 || want > grants->next_want || grants->return_count == RR_WINDOW) return -1;
        if (!code) grants->returns[grants->return_count++] = *grant;
        return 0;
    }
    rr_count(rail, RR_RAIL_GRANT_WAIT_NS, rr_now_ns() - work->parked_ns);
    if (code) {
        rr_work_done(rail, work, code);
        return 0;
    }
    work->grant = *grant;
    if (grants->granted_last)
        grants->granted_last->next = work;
    else
        grants->granted = work;
    grants->granted_last = work;
    return 0;
}

struct rr_work *rr_grants_next(struct rr_grants *grants)
{
    struct rr_work *work = grants->granted;
    if (!work) return NULL;
    grants->granted = work->next;
    if (!grants->granted) grants->granted_last = NULL;
    work->next = NULL;
    return work;
}

void rr_grants_purge(struct rr_rail *rail, struct rr_grants *grants)
{
    for (int granted = 0; granted < 2; granted++) {
        struct rr_work **link = granted ? &grants->granted : &grants->parked, *last = NULL;
        while (*link) {
            struct rr_work *work = *link;
            struct rr_client *client = work->source->client;
            uint32_t result = rr_transfer_stopped(client, work->transfer, work->generation);
            if (!result && client->ports[rail->number].detaching) result = RR_CLIENT_GONE;
            if (!result || (granted && grants->return_count == RR_WINDOW)) {
                last = work;
                link = &work->next;
                continue;
            }
            *link = work->next;
            work->next = NULL;
            grants->parked_count -= !granted;
            if (granted) grants->returns[grants->return_count++] = work->grant;
            rr_work_done(rail, work, result);
        }
        if (granted) grants->granted_last = last;
    }
}

void rr_grants_end_stopped(struct rr_rail *rail, struct rr_grants *grants)
{
    rr_end_stopped(rail, &grants->parked);
    rr_end_stopped(rail, &grants->granted);
}

void rr_grants_settle(struct rr_rail *rail, struct rr_grants *grants, uint32_t otherwise)
{
    struct rr_work *lists[2] = {grants->granted, grants->parked};
    grants->granted = grants->granted_last = grants->parked = NULL;
    for (int i = 0; i < 2; i++) {
        for (struct rr_work *work = lists[i], *next; work; work = next) {
            next = work->next;
            work->next = NULL;
            rr_work_again(rail, work, otherwise);
        }
    }
}
