/* The completion of a transfer. One daemon-private 64-bit word holds generation and remaining. The first slice of a
 * generation that any rail collects sets remaining to BIAS; each finished slice takes one off; the final slice, which
 * knows how many there are and may finish while others are not even collected, takes BIAS - total off as well. Who
 * takes it to zero writes the record, then done, then wakes whoever said that it waits.
 *
 * A client uses the same transfer slot for two generations, its slices spread over three rails in any way. Or a
 * hostile client adds slices that no correct client sends: of another generation, or more than it said.
 *
 * No run is infinite (checked apart: no cycles), so what the monitor asserts at the end of every run is progress. */
#define RAILS 3
#define MOST 3 /* slices of a transfer */
#define GENERATIONS 2
#define BIAS 16

typedef Word {
    byte generation;
    byte remaining
}
Word word;
byte finished_bytes; /* daemon-private, taken and zeroed by who writes the record */
bool finished_failed;

/* the transfer's record, in the client's segment */
byte done, record_bytes;
bool record_failed, waiting;

bool asleep, hostile, client_ended;
byte published[GENERATIONS + 1];
bool failed[GENERATIONS + 1];

chan rings[RAILS] = [MOST] of { byte, byte }; /* generation, total (final slice) or 0 */

inline push(generation, total)
{
    if
    :: rings[0]!generation, total
    :: rings[1]!generation, total
    :: rings[2]!generation, total
    fi
}

proctype client()
{
    byte generation = 1, total, i, seen;
    do
    :: generation > GENERATIONS -> break
    :: else ->
        if
        :: total = (hostile -> MOST - generation : MOST)
        :: generation == 1 && !hostile -> total = 1
        fi;
        do
        :: i + 1 < total -> atomic { push(generation, 0); i++ }
        :: else -> break
        od;
        push(generation, total);
        do
        :: done == generation -> break
        :: done != generation ->
            atomic { waiting = true; seen = done }; /* sleep_wake.pml has the store buffers of this handshake */
            if
            :: seen == generation
            :: else ->
                atomic {
                    if
                    :: done != seen /* the futex call returns at once */
                    :: else -> asleep = true
                    fi
                };
end_wait:
                !asleep /* a hostile client may wait for ever */
            fi;
            atomic { waiting = false; seen = 0 }
        od;
        assert(published[generation] == 1);
        atomic {
            assert(hostile || (record_bytes == total && record_failed == failed[generation]));
            generation++; total = 0; i = 0
        }
    od;
    client_ended = true
}

/* Slices that no correct client sends. */
proctype forger()
{
end_quiet:
    if
    :: push(1, 0)
    :: push(1, 1)
    :: push(2, 0)
    fi
}

proctype rail(byte me)
{
    byte generation, total, was_generation, was_remaining, less, taken_bytes;
    bool taken_failed, wake;
end_idle:
    do
    :: rings[me]?generation, total ->
        /* collect */
#ifdef MUTATION_NO_BIAS
        atomic { word.generation = generation; word.remaining++ }; /* what was collected and is not finished */
        total = 0;
#else
        do
        :: atomic { was_generation = word.generation; was_remaining = word.remaining };
            if
            :: was_generation == generation && was_remaining != 0 -> break
            :: was_generation == generation - 1 && was_remaining == 0 ->
                atomic {
#ifdef MUTATION_START_WITHOUT_COMPARE
                    word.generation = generation; word.remaining = BIAS; break
#else
                    if
                    :: word.generation == was_generation && word.remaining == was_remaining ->
                        word.generation = generation; word.remaining = BIAS;
#ifdef MUTATION_BYTES_CLEARED_BY_FIRST
                        wake = true; /* borrowed: this rail was first */
#endif
                        break
                    :: else
                    fi
#endif
                }
#ifndef MUTATION_GENERATION_NOT_CHECKED
            :: else -> goto violation
#else
            :: else -> break
#endif
            fi
        od;
#endif
#ifdef MUTATION_BYTES_CLEARED_BY_FIRST
        if
        :: wake -> atomic { finished_bytes = 0; wake = false }
        :: else
        fi;
#endif
        /* the slice is moved: other slices are collected and finished meanwhile */
        atomic {
            if
            :: true
            :: !hostile -> failed[generation] = true; finished_failed = true /* first error wins */
            fi
        };
#ifndef MUTATION_BYTES_AFTER_COUNT
        finished_bytes++;
#endif
        /* finish */
        less = 1;
        if
        :: total != 0 -> less = 1 + BIAS - total
        :: else
        fi;
        do
        :: atomic { was_generation = word.generation; was_remaining = word.remaining };
            if
#ifndef MUTATION_GENERATION_NOT_CHECKED
            :: was_generation != generation -> goto violation
#endif
#ifndef MUTATION_UNDERFLOW_NOT_CHECKED
            :: was_remaining < less -> goto violation
#endif
            :: else ->
                atomic {
#ifdef MUTATION_COUNT_WITHOUT_COMPARE
                    word.remaining = was_remaining - less;
                    break
#else
                    if
                    :: word.generation == was_generation && word.remaining == was_remaining ->
                        word.remaining = was_remaining - less;
                        assert(word.remaining <= BIAS); /* it went below zero */
                        break
                    :: else
                    fi
#endif
                }
            fi
        od;
#ifdef MUTATION_BYTES_AFTER_COUNT
        finished_bytes++;
#endif
        if
        :: was_remaining == less ->
            atomic {
                assert(generation == word.generation || hostile);
                published[generation]++;
                assert(published[generation] == 1);
                taken_bytes = finished_bytes; finished_bytes = 0;
                taken_failed = finished_failed; finished_failed = false
            };
#ifdef MUTATION_DONE_BEFORE_RECORD
            done = generation;
#endif
            atomic { record_bytes = taken_bytes; record_failed = taken_failed };
#ifdef MUTATION_WAITING_READ_BEFORE_DONE
            wake = waiting;
#endif
#ifndef MUTATION_DONE_BEFORE_RECORD
            done = generation;
#endif
#ifndef MUTATION_WAITING_READ_BEFORE_DONE
            wake = waiting;
#endif
            if
            :: wake -> asleep = false
            :: else
            fi
        :: else
        fi;
        goto next;
violation:
        assert(hostile);
next:
        atomic {
            generation = 0; total = 0; was_generation = 0; was_remaining = 0; less = 0;
            taken_bytes = 0; taken_failed = false; wake = false
        }
    od
}

/* Runs when nothing else can. */
proctype monitor()
{
    timeout;
    assert(client_ended || hostile);
    assert(hostile || word.remaining == 0)
}

init {
    atomic {
        run monitor();
        run rail(0);
        run rail(1);
        run rail(2);
        run client();
        if
        :: true
        :: hostile = true; run forger()
        fi
    }
}
