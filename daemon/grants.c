#include "grants.h"

#include "window.h"

int rr_grants_may_ask(const struct rr_grants *grants)
{
    return grants->asked + grants->granted_count + grants->return_count < RR_WINDOW;
}

static void park(struct rr_rail *rail, struct rr_grants *grants, struct rr_connection *connection, struct rr_work *work, uint64_t want)
{
    work->state = RR_WORK_PARKED;
    work->connection = connection;
    work->sequence = want;
    work->parked_ns = rr_now_ns();
    work->next = grants->parked;
    grants->parked = work;
    rr_count(rail, RR_RAIL_GRANT_WAITS, 1);
}

void rr_grants_park(struct rr_rail *rail, struct rr_grants *grants, struct rr_connection *connection, struct rr_work *work)
{
    grants->asked++;
    work->inherits = 0;
    park(rail, grants, connection, work, ++grants->next_want);
}

/* A slot is good for any slice: none is larger than the receiver's slots. */
int rr_grants_inherit(struct rr_rail *rail, struct rr_grants *grants, struct rr_connection *connection, struct rr_work *work)
{
    struct rr_given_up *oldest = NULL;
    for (uint32_t i = 0; i < grants->given_up_count; i++) {
        struct rr_given_up *one = &grants->given_up[i];
        if (one->owner == work->owner && (!oldest || one->want < oldest->want)) oldest = one;
    }
    if (!oldest) return 0;
    work->inherits = 1;
    park(rail, grants, connection, work, oldest->want);
    *oldest = grants->given_up[--grants->given_up_count];
    return 1;
}

static struct rr_work *unpark(struct rr_grants *grants, uint64_t want)
{
    for (struct rr_work **link = &grants->parked; *link; link = &(*link)->next) {
        struct rr_work *work = *link;
        if (work->sequence != want) continue;
        *link = work->next;
        work->next = NULL;
        return work;
    }
    return NULL;
}

static int was_given_up(struct rr_grants *grants, uint64_t want)
{
    for (uint32_t i = 0; i < grants->given_up_count; i++) {
        if (grants->given_up[i].want != want) continue;
        grants->given_up[i] = grants->given_up[--grants->given_up_count];
        return 1;
    }
    return 0;
}

int rr_grants_answer(struct rr_rail *rail, struct rr_grants *grants, uint64_t want, uint32_t code, const struct rr_grant *grant)
{
    struct rr_work *work = unpark(grants, want);
    if (!work && !was_given_up(grants, want)) return -1;
    grants->asked--;
    if (!work) {
        if (!code) grants->returns[grants->return_count++] = *grant;
        return 0;
    }
    rr_count(rail, RR_RAIL_GRANT_WAIT_NS, rr_now_ns() - work->parked_ns);
    if (code && work->inherits) { /* may be meant for a client that had the owner's number before */
        work->connection = NULL;
        rr_path_queue(rail, work, 1);
        return 0;
    }
    if (code) {
        rr_work_done(rail, work, code);
        return 0;
    }
    work->grant = *grant;
    grants->granted_count++;
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
    grants->granted_count--;
    grants->granted = work->next;
    if (!grants->granted) grants->granted_last = NULL;
    work->next = NULL;
    return work;
}

void rr_grants_unused(struct rr_grants *grants, const struct rr_grant *grant) { grants->returns[grants->return_count++] = *grant; }

void rr_grants_purge(struct rr_rail *rail, struct rr_grants *grants)
{
    for (int granted = 0; granted < 2; granted++) {
        struct rr_work **link = granted ? &grants->granted : &grants->parked, *last = NULL;
        while (*link) {
            struct rr_work *work = *link;
            struct rr_client *client = work->source->client;
            uint32_t result = rr_transfer_stopped(client, work->transfer, work->generation);
            if (!result && client->ports[rail->number].detaching) result = RR_CLIENT_GONE;
            if (!result) {
                last = work;
                link = &work->next;
                continue;
            }
            *link = work->next;
            work->next = NULL;
            grants->granted_count -= (uint32_t)granted;
            if (granted)
                rr_grants_unused(grants, &work->grant);
            else
                grants->given_up[grants->given_up_count++] = (struct rr_given_up){work->sequence, work->owner};
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
