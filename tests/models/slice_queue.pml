/* The SliceQueue of a rail (shm_layout/ring.h): one single-producer ring per client process and one consumer that
 * visits them. A producer may die, or stop for good, before any access to shared memory; the owner of the last ring
 * may be hostile and write whatever it likes. A slice is two words, so that a torn one shows; positions are bytes
 * and wrap during the run.
 *
 * No run is infinite (checked apart: no cycles), so what the monitor asserts at the end of every run is progress. */
#define RINGS 3
#define SLICES(ring) (3 - ring) /* the first producer goes round its ring */
#define CAPACITY 2
#define START 254
#define LIMIT 3 /* largest value that passes the consumer's check of a slice */
#define LAST (RINGS - 1)
#define DISTANCE(from, to) (((to) + 256 - (from)) % 256)
#define AT(ring, position) ((ring) * CAPACITY + (position) % CAPACITY)

byte produced[RINGS], consumed[RINGS]; /* shared words */
byte low[RINGS * CAPACITY], high[RINGS * CAPACITY];

bool last_is_hostile;
bool halted[RINGS], violated[RINGS];
byte taken[RINGS];

proctype producer(byte me)
{
    byte position = START, consumed_seen = START, sent, batch, i;
    do
    :: sent == SLICES(me) -> break
    :: else ->
#ifndef MUTATION_NO_ROOM_CHECK
        if
        :: DISTANCE(consumed_seen, position) < CAPACITY
        :: else -> /* full: a real producer goes to other work and looks again */
            if
            :: atomic { consumed[me] != consumed_seen -> consumed_seen = consumed[me] }
            :: goto halt
            fi
        fi;
#endif
        atomic {
            batch = 1;
            if
            :: true
            :: sent + 1 < SLICES(me) && DISTANCE(consumed_seen, position) + 1 < CAPACITY -> batch = 2
            fi
        };
#ifdef MUTATION_POSITION_BEFORE_SLICES
        produced[me] = position + batch;
#endif
        do
        :: i < batch ->
            if
            :: low[AT(me, position + i)] = sent + i + 1
            :: goto halt
            fi;
            if
            :: atomic { high[AT(me, position + i)] = sent + i + 1; i++ }
            :: goto halt
            fi
        :: else -> break
        od;
        atomic { position = position + batch; sent = sent + batch; i = 0 };
        if
#ifdef MUTATION_POSITION_BEFORE_SLICES
        :: true
#else
        :: produced[me] = position
#endif
        :: goto halt
        fi
    od;
    goto end;
halt:
    atomic { halted[me] = true; position = 0; consumed_seen = 0; sent = 0; batch = 0; i = 0 };
end:
    skip
}

/* Any position and any slice, at any time. */
proctype hostile()
{
    byte writes;
end_quiet:
    do
    :: writes < 4 ->
        if
        :: produced[LAST] = START - 1
        :: produced[LAST] = START + 1
        :: produced[LAST] = START + CAPACITY
        :: produced[LAST] = START + CAPACITY + 1
        :: low[AT(LAST, START)] = LIMIT + 1
        :: low[AT(LAST, START)] = LIMIT
        fi;
        writes++
    od
}

#define WAITS(ring) (!violated[ring] && produced[ring] != consumed[ring])

proctype consumer()
{
    byte ring, available, count, i, first, second;
#ifdef MUTATION_WAITS_FOR_ONE_RING
    byte turn;
#endif
    byte seen[RINGS], position[RINGS];
    atomic {
        do
        :: ring < RINGS -> seen[ring] = START; position[ring] = START; ring++
        :: else -> break
        od;
        ring = 0
    };
visit:
end_idle: /* every ring is empty: a real rail goes to other work and in the end sleeps */
#ifdef MUTATION_WAITS_FOR_ONE_RING
    if
    :: WAITS(turn) -> ring = turn
    :: taken[turn] == SLICES(turn) || violated[turn]
    fi;
    turn = (turn + 1) % RINGS;
#else
    if /* in any order, so in the real order too */
    :: WAITS(0) -> ring = 0
    :: WAITS(1) -> ring = 1
    :: WAITS(2) -> ring = 2
    fi;
#endif
    atomic {
        if
        :: seen[ring] == position[ring] -> seen[ring] = produced[ring]
        :: else
        fi;
        available = DISTANCE(position[ring], seen[ring]);
        if
        :: available == 0 -> goto next
#ifndef MUTATION_NO_BOUND_CHECK
        :: available > CAPACITY ->
            assert(ring == LAST && last_is_hostile);
            violated[ring] = true;
            goto next
#endif
        :: else
        fi;
        assert(available <= CAPACITY);
        count = available;
        if
        :: true
        :: count > 1 -> count = 1 /* the visit's budget ended */
        fi
    };
#ifdef MUTATION_RELEASE_BEFORE_COPY
    consumed[ring] = position[ring] + count;
#endif
    do
    :: i < count ->
        first = low[AT(ring, position[ring] + i)];
        atomic {
            second = high[AT(ring, position[ring] + i)];
            i++;
            if
            :: ring != LAST || !last_is_hostile ->
                taken[ring]++;
                assert(first == taken[ring] && second == taken[ring])
            :: else
            fi
        };
        if
        :: ring == LAST && last_is_hostile ->
            if
            :: first > LIMIT -> violated[ring] = true
            :: else ->
#ifdef MUTATION_CHECKED_COPY_NOT_USED
                first = low[AT(ring, position[ring] + i - 1)];
#endif
                assert(first <= LIMIT)
            fi
        :: else
        fi
    :: else -> break
    od;
    atomic { position[ring] = position[ring] + count; consumed[ring] = position[ring] };
next:
    atomic { ring = 0; first = 0; second = 0; i = 0; count = 0; available = 0 };
    goto visit
}

/* Runs when nothing else can. */
proctype monitor()
{
    byte ring;
    timeout;
    atomic {
        do
        :: ring < RINGS ->
            if
            :: ring == LAST && last_is_hostile -> assert(violated[ring] || consumed[ring] == produced[ring])
            :: else ->
                assert(!violated[ring]);
                assert(consumed[ring] == produced[ring]); /* what was published was taken, whoever died */
                assert(halted[ring] || taken[ring] == SLICES(ring))
            fi;
            ring++
        :: else -> break
        od
    }
}

init {
    byte ring;
    atomic {
        do
        :: ring < RINGS -> produced[ring] = START; consumed[ring] = START; ring++
        :: else -> break
        od;
        ring = 0;
        run monitor();
        run consumer();
        run producer(1);
        if
        :: run producer(0); run producer(LAST)
        :: halted[0] = true; last_is_hostile = true; run hostile()
        fi
    }
}
