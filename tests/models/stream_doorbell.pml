/* A slot that a GPU fills (client/gpu_lane.c, daemon/rail.c): the client announces it (head) and wakes the rail if that
 * sleeps, then enqueues copy and doorbell on a stream; the GPU rings later and can wake nobody. So a rail must not sleep
 * without an end while a slot is announced and not filled; it naps. Stores of client and rail wait in a first-in
 * first-out buffer until they are drained; the GPU's store goes to memory when it happens. The client may die before any
 * step; its lane is then taken back by other means, and only what it has rung counts.
 *
 * A nap is a wait for whatever comes next: no run is infinite, and what the monitor asserts at the end is progress. */
#define SLOTS 2

byte head, doorbell, taken, rung;
bool flag, event;
bool head_pending;
byte enqueued;
chan flag_stores = [3] of { bool };

proctype processors()
{
end_idle:
    do
    :: atomic { head_pending -> head++; head_pending = false }
    :: atomic { flag_stores?flag }
    od
}

proctype client()
{
    byte i;
    bool sleeping;
    do
    :: i == SLOTS -> break
    :: else ->
#ifdef MUTATION_FLAG_READ_BEFORE_ANNOUNCING
        sleeping = flag;
#endif
        if
        :: atomic { !head_pending -> head_pending = true }
        :: goto dead
        fi;
#ifndef MUTATION_NO_BARRIER_IN_CLIENT
        !head_pending;
#endif
        if
#ifdef MUTATION_FLAG_READ_BEFORE_ANNOUNCING
        :: true
#else
        :: sleeping = flag
#endif
        :: goto dead
        fi;
        if
        :: sleeping -> event = true
        :: else
        fi;
        if
        :: atomic { enqueued++; i++; sleeping = false }
        :: goto dead
        fi
    od;
dead:
    atomic { i = 0; sleeping = false }
}

/* In stream order; never before the announcement has reached memory, which the call into the driver sees to. */
proctype gpu()
{
end_idle:
    do
    :: atomic { rung < enqueued && rung < head -> rung++; doorbell = rung }
    od
}

proctype rail()
{
work_on:
    do
    :: atomic { taken != doorbell -> taken = doorbell }
    :: else -> break
    od;
    if
#ifndef MUTATION_NO_NAP
    :: head != doorbell ->
end_nap: /* of a slot whose client has died before it enqueued anything, naps go on for ever */
        atomic { (taken != doorbell || event) -> event = false };
        goto work_on
#endif
    :: else
    fi;
    flag_stores!true;
#ifndef MUTATION_NO_BARRIER_IN_RAIL
    empty(flag_stores);
#endif
    if
    :: taken != doorbell
#if !defined(MUTATION_HEAD_NOT_LOOKED_AT_AGAIN) && !defined(MUTATION_NO_NAP)
    :: taken == doorbell && head != doorbell
    :: taken == doorbell && head == doorbell ->
#else
    :: taken == doorbell ->
#endif
end_asleep:
        atomic { event -> event = false }
    fi;
    flag_stores!false;
    goto work_on
}

/* Runs when nothing else can. */
proctype monitor()
{
    timeout;
    assert(taken == rung) /* nobody sleeps over a slot that is filled */
}

init {
    atomic { run monitor(); run processors(); run gpu(); run rail(); run client() }
}
