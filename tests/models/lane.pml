/* A lane (shm_layout/lane.h) and two owners of it, one after the other: the first dies before any of its accesses to
 * shared memory, or is hostile; the second lives. Positions are announced in order and filled in order by the owner's
 * copy stream, which may run on after its owner's death; slots come back in any order, and one of them may be held by
 * a dead peer until the fence. The daemon gives the lane away only after the old owner's exit and the drain of its
 * slots, as new memory and new words under a new generation.
 *
 * No run is infinite (checked apart: no cycles), so what the monitor asserts at the end of every run is progress. */
#define SLOTS 2
#define OWNERS 2
#define POSITIONS(owner) (owner == 0 -> 2 : 3)
#define START 254
#define VOID 100
#define DISTANCE(from, to) (((to) + 256 - (from)) % 256)
#define FIRST_BYTE(position) (DISTANCE(START, position) + 1)

#ifdef MUTATION_WORDS_REUSED
#define WORDS(owner) 0
#else
#define WORDS(owner) owner
#endif
#ifdef MUTATION_MEMORY_REUSED
#define MEMORY(owner) 0
#else
#define MEMORY(owner) owner
#endif
#define RING_AT(owner, position) (WORDS(owner) * SLOTS + (position) % SLOTS)
#define TABLE_AT(owner, slot) (WORDS(owner) * SLOTS + slot)
#define BYTES_AT(owner, slot) (MEMORY(owner) * SLOTS + slot)

/* shared words, by generation */
byte head[OWNERS], doorbell[OWNERS], completed[OWNERS];
byte announce[OWNERS * SLOTS], freed[OWNERS * SLOTS], table[OWNERS * SLOTS];
byte bytes[OWNERS * SLOTS]; /* relay memory */

bool hostile, violated, exited, detach, drained, released;
byte generation;
byte rung, returned, stuck; /* of the second owner: what the monitor compares */

chan stream_work[OWNERS] = [SLOTS] of { byte, byte, bool }; /* slot, position, copy first */

/* A step that the first owner may not live to make. */
#define STEP(access) if :: access :: owner == 0 -> goto gone fi

proctype feeder(byte owner)
{
    byte position = START, completed_seen = START, limit, slot, free = 3, wanted;
    bool given_up;
    do
    :: DISTANCE(START, position) == POSITIONS(owner) -> break
    :: else ->
        do
        :: free != 0 -> break
        :: atomic { completed[WORDS(owner)] != completed_seen -> limit = completed[WORDS(owner)] };
            do
            :: limit == completed_seen -> break
            :: atomic {
                    limit != completed_seen ->
                    slot = freed[RING_AT(owner, completed_seen)];
                    assert(slot < SLOTS && (free & (1 << slot)) == 0);
                    free = free | (1 << slot);
                    completed_seen++;
                    slot = 0
                }
            od
        :: owner == 0 -> goto gone
        od;
        atomic {
            if
            :: free & 1 -> slot = 0
            :: free & 2 -> slot = 1
            fi;
            free = free & ~(1 << slot);
            announce[RING_AT(owner, position)] = slot
        };
        STEP(head[WORDS(owner)] = position + 1);
        atomic {
            if
            :: given_up = true; table[TABLE_AT(owner, slot)] = VOID
            :: given_up = false; table[TABLE_AT(owner, slot)] = FIRST_BYTE(position)
            :: owner == 0 -> goto gone
            fi
        };
        if
        :: owner == 0 -> goto gone
#ifdef MUTATION_VOID_NOT_RUNG
        :: given_up
        :: !given_up -> stream_work[owner]!slot, position, true
#else
#ifdef MUTATION_VOID_RUNG_OUT_OF_ORDER
        :: given_up -> doorbell[WORDS(owner)] = position + 1
        :: !given_up -> stream_work[owner]!slot, position, true
#else
        :: stream_work[owner]!slot, position, !given_up
#endif
#endif
        fi;
        atomic { position = position + 1; slot = 0; given_up = false }
    od;
gone:
    atomic {
        if
        :: owner == 0 -> exited = true
        :: else
        fi;
        position = 0; completed_seen = 0; limit = 0; slot = 0; free = 0; given_up = false
    }
}

/* The owner's copy stream: no step of it waits for the owner to be alive. */
proctype stream(byte owner)
{
    byte slot, position;
    bool copy;
end_idle:
    do
    :: stream_work[owner]?slot, position, copy ->
#ifdef MUTATION_DOORBELL_BEFORE_COPY
        doorbell[WORDS(owner)] = position + 1;
#endif
        if
        :: copy -> bytes[BYTES_AT(owner, slot)] = FIRST_BYTE(position)
        :: else
        fi;
#ifndef MUTATION_DOORBELL_BEFORE_COPY
        doorbell[WORDS(owner)] = position + 1;
#endif
        atomic { slot = 0; position = 0; copy = false }
    od
}

/* A first owner that writes anything anywhere in its segment. */
proctype scribbler()
{
    byte writes;
    do
    :: writes < 3 ->
        if
        :: head[0] = START + 1
        :: head[0] = START + SLOTS
        :: head[0] = START + SLOTS + 1
        :: doorbell[0] = START - 1
        :: doorbell[0] = START + 1
        :: doorbell[0] = START + SLOTS
        :: doorbell[0] = START + SLOTS + 1
        :: announce[0] = 1
        :: announce[1] = SLOTS
        fi;
        writes++
    :: break
    od;
    exited = true
}

mtype = { FREE, POSTED, STUCK, VOIDED };

proctype rail()
{
    byte owner, head_seen = START, doorbell_seen = START, taken = START, completed_here = START;
    byte slot, now_doorbell, now_head;
    mtype state[SLOTS] = FREE;
    byte expected[SLOTS], holder[SLOTS];
#ifdef MUTATION_RETURN_IN_ORDER
    byte position_of[SLOTS];
#define MAY_RETURN(slot) (position_of[slot] == completed_here)
#else
#define MAY_RETURN(slot) true
#endif
#define RETURNS(slot) ((state[slot] == POSTED || state[slot] == VOIDED || (state[slot] == STUCK && detach)) && MAY_RETURN(slot))

end_idle:
    do
    :: !violated && !detach && taken == doorbell_seen && doorbell[WORDS(owner)] != doorbell_seen ->
        atomic {
#ifdef MUTATION_HEAD_BEFORE_DOORBELL
            now_head = head[WORDS(owner)]
        };
        atomic {
            now_doorbell = doorbell[WORDS(owner)];
#else
            now_doorbell = doorbell[WORDS(owner)]
        };
        atomic {
            now_head = head[WORDS(owner)];
#endif
            if
#ifndef MUTATION_ORDER_NOT_CHECKED
            :: DISTANCE(completed_here, now_doorbell) > SLOTS || DISTANCE(completed_here, now_head) > SLOTS ||
                DISTANCE(completed_here, now_doorbell) > DISTANCE(completed_here, now_head) ||
                DISTANCE(completed_here, now_doorbell) < DISTANCE(completed_here, doorbell_seen) -> violated = true
#endif
            :: else -> doorbell_seen = now_doorbell; head_seen = now_head
            fi;
            assert(!violated || (hostile && owner == 0));
            assert(violated || DISTANCE(taken, doorbell_seen) <= DISTANCE(taken, head_seen));
            assert(violated || DISTANCE(completed_here, head_seen) <= SLOTS);
            now_doorbell = 0; now_head = 0
        }
    :: atomic {
            !violated && !detach && taken != doorbell_seen ->
            slot = announce[RING_AT(owner, taken)];
            if
#ifndef MUTATION_RANGE_NOT_CHECKED
            :: slot >= SLOTS -> violated = true
#endif
#ifndef MUTATION_HELD_NOT_CHECKED
            :: slot < SLOTS && state[slot] != FREE -> violated = true
#endif
            :: else ->
                assert(slot < SLOTS);
                assert(state[slot] == FREE);
                taken = taken + 1;
                expected[slot] = table[TABLE_AT(owner, slot)];
                holder[slot] = owner;
#ifdef MUTATION_RETURN_IN_ORDER
                position_of[slot] = taken - 1;
#endif
                if
                :: expected[slot] == VOID -> state[slot] = VOIDED
                :: expected[slot] != VOID -> state[slot] = POSTED
                :: expected[slot] != VOID && state[0] != STUCK && state[1] != STUCK -> /* one peer's share of the slots */
                    state[slot] = STUCK;
                    stuck = stuck + owner
                fi
            fi;
            assert(!violated || (hostile && owner == 0));
            slot = 0
        }
    :: atomic {
            if
            :: RETURNS(0) -> slot = 0
            :: RETURNS(1) -> slot = 1
            fi;
            if
            :: state[slot] != VOIDED && !(hostile && holder[slot] == 0) ->
                assert(bytes[BYTES_AT(holder[slot], slot)] == expected[slot]); /* what the NIC read up to now */
#ifndef MUTATION_MEMORY_REUSED
                assert(!released || holder[slot] != 0)
#endif
            :: else
            fi;
            state[slot] = FREE;
            expected[slot] = 0;
#ifdef MUTATION_RETURN_IN_ORDER
            position_of[slot] = 0;
#endif
            returned = returned + owner
        };
#ifdef MUTATION_COMPLETED_BEFORE_FREED
        completed[WORDS(owner)] = completed_here + 1;
        freed[RING_AT(owner, completed_here)] = slot;
#else
        freed[RING_AT(owner, completed_here)] = slot;
        completed[WORDS(owner)] = completed_here + 1;
#endif
        atomic { completed_here = completed_here + 1; slot = 0 }
#ifdef MUTATION_NO_DRAIN
    :: atomic { detach && !drained -> drained = true }
#else
    :: atomic { detach && !drained && state[0] == FREE && state[1] == FREE -> drained = true }
#endif
    :: atomic {
            detach && generation != owner ->
            owner = generation;
            detach = false; violated = false;
            head_seen = START; doorbell_seen = START; taken = START; completed_here = START
        }
    od
}

/* The daemon's main thread. */
proctype conductor()
{
    byte slot;
    exited; /* the pidfd says so; a hang-up would prove nothing */
    detach = true;
    drained;
    atomic {
        released = true;
        head[0] = START; doorbell[0] = START; completed[0] = START;
        slot = 0;
        do
        :: slot < SLOTS -> announce[slot] = 0; freed[slot] = 0; table[slot] = 0; bytes[slot] = 0; slot++
        :: else -> slot = 0; break
        od;
        generation = 1;
        run feeder(1);
        run stream(1)
    }
}

/* Runs when nothing else can. */
proctype monitor()
{
    timeout;
    assert(generation == 1);
    assert(DISTANCE(START, head[WORDS(1)]) == POSITIONS(1));
    assert(head[WORDS(1)] == doorbell[WORDS(1)]);
    assert(returned + stuck == POSITIONS(1)) /* a slot at a dead peer held back no other */
}

init {
    byte owner;
    atomic {
        do
        :: owner < OWNERS -> head[owner] = START; doorbell[owner] = START; completed[owner] = START; owner++
        :: else -> break
        od;
        owner = 0;
        run monitor();
        run rail();
        run conductor();
        if
        :: run feeder(0); run stream(0)
        :: hostile = true; run scribbler()
        fi
    }
}
