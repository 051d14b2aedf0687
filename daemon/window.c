#include "window.h"

#include "nic.h"

void rr_window_init(struct rr_window *window)
{
    window->free_count = RR_WINDOW;
    for (uint32_t i = 0; i < RR_WINDOW; i++) window->free[i] = (uint16_t)(RR_WINDOW - 1 - i);
}

uint16_t rr_window_take(struct rr_window *window, struct rr_work *work)
{
    uint16_t entry = window->free[--window->free_count];
    window->works[entry] = work;
    window->sequences[entry] = work->sequence;
    return entry;
}

void rr_window_free(struct rr_window *window, uint32_t entry)
{
    window->works[entry] = NULL;
    window->sequences[entry] = 0;
    window->free[window->free_count++] = (uint16_t)entry;
}

uint32_t rr_window_count(const struct rr_window *window)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < RR_WINDOW; i++) count += window->works[i] != NULL;
    return count;
}

void rr_work_again(struct rr_rail *rail, struct rr_work *work, uint32_t otherwise)
{
    struct rr_client *client = work->source->client;
    uint32_t result = rr_transfer_stopped(client, work->transfer, work->generation);
    if (!result && client->ports[rail->number].detaching) result = RR_CLIENT_GONE;
    if (!result) result = otherwise;
    work->connection = NULL;
    work->grant.grant = 0;
    if (result) {
        rr_work_done(rail, work, result);
    } else {
        rr_count(rail, RR_RAIL_SLICES_RESENT, 1);
        rr_path_queue(rail, work, 1);
    }
}

void rr_end_stopped(struct rr_rail *rail, struct rr_work **link)
{
    while (*link) {
        struct rr_work *work = *link;
        uint32_t result = rr_transfer_stopped(work->source->client, work->transfer, work->generation);
        if (!result) {
            link = &work->next;
            continue;
        }
        *link = work->next;
        work->next = NULL;
        rr_work_done(rail, work, result);
    }
}

void rr_window_owe_stopped(struct rr_rail *rail, struct rr_window *window)
{
    for (uint32_t i = 0; i < RR_WINDOW; i++) {
        struct rr_work *work = window->works[i];
        if (!work || !rr_transfer_stopped(work->source->client, work->transfer, work->generation)) continue;
        window->works[i] = NULL;
        window->owed[i] = rr_work_owe(rail, work);
    }
}

static int ack_of(const struct rr_ack *acks, uint32_t count, uint64_t sequence, uint32_t *code)
{
    for (uint32_t i = 0; i < count; i++) {
        if (acks[i].sequence != sequence) continue;
        *code = rr_is_answer(acks[i].code) || acks[i].code == RR_UNSETTLED ? (uint32_t)acks[i].code : RR_PEER_LOST;
        return 1;
    }
    return 0;
}

/* What the receiver says of an entry's frame; RR_PEER_LOST: nothing, it was not placed. */
static uint32_t code_of(const struct rr_window *window, uint32_t entry, uint64_t placed, const struct rr_ack *acks, uint32_t ack_count)
{
    uint32_t code = RR_PEER_LOST;
    if (window->sequences[entry] <= placed) ack_of(acks, ack_count, window->sequences[entry], &code);
    return code;
}

static int is_leaving(const struct rr_rail *rail, const struct rr_source *source) { return (int)source->client->ports[rail->number].detaching; }

/* How many debts stay. */
static uint32_t pay(struct rr_rail *rail, struct rr_window *window, uint64_t placed, const struct rr_ack *acks, uint32_t ack_count)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < RR_WINDOW; i++) {
        struct rr_debt *debt = &window->owed[i];
        if (!debt->source) continue;
        uint32_t code = code_of(window, i, placed, acks, ack_count);
        if (code == RR_UNSETTLED) {
            if (!is_leaving(rail, debt->source)) {
                kept++;
                continue;
            }
            code = RR_CLIENT_GONE;
        }
        if (code == RR_PEER_LOST) {
            code = rr_transfer_stopped(debt->source->client, debt->transfer, debt->generation);
            if (code == RR_OK) code = RR_PEER_LOST;
        }
        rr_debt_paid(rail, debt, code);
    }
    return kept;
}

static int newest_before(const struct rr_window *window, uint64_t sequence)
{
    int found = -1;
    for (int i = 0; i < (int)RR_WINDOW; i++)
        if (window->works[i] && window->sequences[i] < sequence && (found < 0 || window->sequences[i] > window->sequences[found])) found = i;
    return found;
}

uint32_t rr_window_settle(struct rr_rail *rail, struct rr_window *window, uint64_t placed, const struct rr_ack *acks, uint32_t ack_count,
                          uint32_t otherwise)
{
    uint32_t kept = pay(rail, window, placed, acks, ack_count);
    uint64_t sequence = UINT64_MAX;
    /* Newest first: rr_work_again puts each in front, so they end up in their old order. */
    for (int i; (i = newest_before(window, sequence)) >= 0;) {
        struct rr_work *work = window->works[i];
        uint32_t code = RR_OK;
        sequence = window->sequences[i];
        int arrived = sequence <= placed && ack_of(acks, ack_count, sequence, &code);
        if (code == RR_UNSETTLED && !is_leaving(rail, work->source)) {
            kept++;
            continue;
        }
        window->works[i] = NULL;
        if (arrived)
            rr_work_done(rail, work, code == RR_UNSETTLED ? RR_CLIENT_GONE : code);
        else
            rr_work_again(rail, work, otherwise);
    }
    return kept;
}

void rr_window_let_go(struct rr_rail *rail, struct rr_window *window, const struct rr_client *client)
{
    for (uint32_t i = 0; i < RR_WINDOW; i++) {
        struct rr_work *work = window->works[i];
        if (work && work->source->client == client) {
            window->works[i] = NULL;
            rr_work_done(rail, work, RR_CLIENT_GONE);
        }
        struct rr_debt *debt = &window->owed[i];
        if (debt->source && debt->source->client == client) rr_debt_paid(rail, debt, RR_CLIENT_GONE);
    }
}
