#include "grants.h"

#include "nic.h"
#include "window.h"

static int may_ask(const struct rr_grants *grants, uint32_t owner)
{
    uint32_t out = grants->asked + grants->granted_count + grants->return_count;
    return out < RR_WINDOW && grants->asked_by[owner] < (out < RR_WINDOW / 2 ? RR_WANTS_OF_OWNER : 1u);
}

static void park(struct rr_grants *grants, struct rr_work *work, uint64_t want, int inherits)
{
    work->inherits = (uint32_t)inherits;
    work->sequence = want;
    work->next = grants->parked;
    grants->parked = work;
}

/* The want that another slice for this owner gave up first, or NULL. */
static struct rr_given_up *given_up_by(struct rr_grants *grants, uint32_t owner)
{
    struct rr_given_up *oldest = NULL;
    for (uint32_t i = 0; i < grants->given_up_count; i++) {
        struct rr_given_up *one = &grants->given_up[i];
        if (one->owner == owner && (!oldest || one->want < oldest->want)) oldest = one;
    }
    return oldest;
}

static void inherit(struct rr_grants *grants, struct rr_work *work, struct rr_given_up *given_up)
{
    park(grants, work, given_up->want, 1);
    *given_up = grants->given_up[--grants->given_up_count];
}

static void ask(struct rr_grants *grants, struct rr_work *work)
{
    grants->asked++;
    grants->asked_by[work->owner]++;
    park(grants, work, ++grants->next_want, 0);
}

static void put_aside(struct rr_grants *grants, struct rr_work *work)
{
    struct rr_aside *aside = &grants->aside[work->owner];
    work->next = NULL;
    if (aside->last)
        aside->last->next = work;
    else
        aside->first = work;
    aside->last = work;
    grants->owners_aside[work->owner / 64] |= 1ull << work->owner % 64;
}

static struct rr_work *take_aside(struct rr_grants *grants, uint32_t owner)
{
    struct rr_aside *aside = &grants->aside[owner];
    struct rr_work *work = aside->first;
    aside->first = work->next;
    work->next = NULL;
    if (!aside->first) {
        aside->last = NULL;
        grants->owners_aside[owner / 64] &= ~(1ull << owner % 64);
    }
    return work;
}

int rr_grants_want(struct rr_rail *rail, struct rr_grants *grants, struct rr_connection *connection, struct rr_work *work)
{
    work->state = RR_WORK_PARKED;
    work->connection = connection;
    work->parked_ns = rr_now_ns();
    rr_count(rail, RR_RAIL_GRANT_WAITS, 1);
    int others_wait = grants->aside[work->owner].first != NULL;
    struct rr_given_up *given_up = others_wait ? NULL : given_up_by(grants, work->owner);
    if (given_up) {
        inherit(grants, work, given_up);
        return 0;
    }
    if (others_wait || !may_ask(grants, work->owner)) {
        put_aside(grants, work);
        return 0;
    }
    ask(grants, work);
    return 1;
}

/* The first one of this owner that may ask; those before it inherit, or have been stopped. */
static struct rr_work *due_of(struct rr_rail *rail, struct rr_grants *grants, uint32_t owner)
{
    struct rr_work *work;
    while ((work = grants->aside[owner].first)) {
        uint32_t stopped = rr_transfer_stopped(work->source->client, work->transfer, work->generation);
        if (stopped) {
            rr_work_done(rail, take_aside(grants, owner), stopped);
            continue;
        }
        struct rr_given_up *given_up = given_up_by(grants, owner);
        if (given_up) {
            inherit(grants, take_aside(grants, owner), given_up);
            continue;
        }
        if (!may_ask(grants, owner)) return NULL;
        ask(grants, take_aside(grants, owner));
        return work;
    }
    return NULL;
}

struct rr_work *rr_grants_due(struct rr_rail *rail, struct rr_grants *grants)
{
    if (!rr_grants_waiting(grants)) return NULL;
    for (uint32_t i = 0; i < RR_MAX_CLIENTS; i++) {
        uint32_t owner = (grants->next_owner + i) % RR_MAX_CLIENTS;
        if (!(grants->owners_aside[owner / 64] >> owner % 64 & 1)) continue;
        struct rr_work *work = due_of(rail, grants, owner);
        if (!work) continue;
        grants->next_owner = owner + 1;
        return work;
    }
    return NULL;
}

int rr_grants_waiting(const struct rr_grants *grants)
{
    uint64_t any = 0;
    for (uint32_t i = 0; i < RR_MAX_CLIENTS / 64; i++) any |= grants->owners_aside[i];
    return any != 0;
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

/* The owner, or -1. */
static int was_given_up(struct rr_grants *grants, uint64_t want)
{
    for (uint32_t i = 0; i < grants->given_up_count; i++) {
        if (grants->given_up[i].want != want) continue;
        int owner = (int)grants->given_up[i].owner;
        grants->given_up[i] = grants->given_up[--grants->given_up_count];
        return owner;
    }
    return -1;
}

int rr_grants_answer(struct rr_rail *rail, struct rr_grants *grants, uint64_t want, uint32_t code, const struct rr_grant *grant)
{
    if (!rr_is_answer(code)) return -1;
    struct rr_work *work = unpark(grants, want);
    int owner = work ? (int)work->owner : was_given_up(grants, want);
    if (owner < 0) return -1;
    grants->asked--;
    grants->asked_by[owner]--;
    if (!work) {
        if (!code) grants->returns[grants->return_count++] = *grant;
        return 0;
    }
    rr_count(rail, RR_RAIL_GRANT_WAIT_NS, rr_now_ns() - work->parked_ns);
    if (work->inherits) { /* the answer may be meant for a client that had the owner's number before */
        if (!code) grants->returns[grants->return_count++] = *grant;
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

/* Those of stopped transfers, and of clients that leave, have asked for nothing. */
static void purge_aside(struct rr_rail *rail, struct rr_grants *grants)
{
    for (uint32_t owner = 0; owner < RR_MAX_CLIENTS; owner++) {
        struct rr_work *work = grants->aside[owner].first;
        if (!work) continue;
        grants->aside[owner] = (struct rr_aside){NULL, NULL};
        grants->owners_aside[owner / 64] &= ~(1ull << owner % 64);
        for (struct rr_work *next; work; work = next) {
            next = work->next;
            struct rr_client *client = work->source->client;
            uint32_t result = rr_transfer_stopped(client, work->transfer, work->generation);
            if (!result && client->ports[rail->number].detaching) result = RR_CLIENT_GONE;
            work->next = NULL;
            if (result)
                rr_work_done(rail, work, result);
            else
                put_aside(grants, work);
        }
    }
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
    purge_aside(rail, grants);
}

void rr_grants_end_stopped(struct rr_rail *rail, struct rr_grants *grants)
{
    rr_end_stopped(rail, &grants->parked);
    rr_end_stopped(rail, &grants->granted);
    purge_aside(rail, grants);
}

/* Newest first: each goes in front of those before. */
static void settle_aside(struct rr_rail *rail, struct rr_grants *grants, uint32_t otherwise)
{
    for (uint32_t owner = 0; owner < RR_MAX_CLIENTS; owner++) {
        struct rr_work *newest = NULL;
        while (grants->aside[owner].first) {
            struct rr_work *work = take_aside(grants, owner);
            work->next = newest;
            newest = work;
        }
        for (struct rr_work *next; newest; newest = next) {
            next = newest->next;
            newest->next = NULL;
            rr_work_again(rail, newest, otherwise);
        }
    }
}

void rr_grants_settle(struct rr_rail *rail, struct rr_grants *grants, uint32_t otherwise)
{
    settle_aside(rail, grants, otherwise);
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
