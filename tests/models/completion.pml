/* The completion of a transfer (daemon/completion.c). One daemon-private 64-bit word holds generation and remaining.
 * The first slice of a generation that any rail collects sets remaining to BIAS. The final slice, which knows how many
 * there are and may be collected and finished before others are even collected, takes BIAS - total off when it is
 * collected; each finished slice takes one off. Who takes it to zero ends the transfer: word ENDING, then idle, then
 * the record, settled and done, then wakes whoever said that it waits. Once, the main thread may report a transfer as
 * unsettled before that; record says who of the two writes the client's record.
 *
 * A client uses the same entry for two generations, its slices spread over three rails in any way. Or a hostile client
 * adds a slice that no correct client sends: of another generation, or more than it said.
 *
 * No run is infinite (checked apart: no cycles), so what the monitor asserts at the end of every run is progress. */
#define RAILS 3
#define MOST 3 /* slices of a transfer */
#define GENERATIONS 2
#define BIAS 16
#define ENDING 255
#define LIVE(count) ((count) != 0 && (count) != ENDING)

mtype = { GOOD, FAILED, UNSETTLED, NOBODY, REPORTING, REPORTED, ENDED };

typedef Word {
    byte generation;
    byte remaining
}
Word word;
byte finished_bytes; /* daemon-private, taken and zeroed by who ends the transfer */
mtype fault = GOOD;
byte record_generation; /* these two are one word */
mtype record = NOBODY;

/* the transfer's entry in the client's segment */
byte done, settled, bytes;
mtype result;
bool waiting;

bool asleep, hostile, alone, client_ended;
/* what must have been told: by generation */
bool failed[GENERATIONS + 1], reported[GENERATIONS + 1];
byte unfinished;

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
        atomic {
            if
            :: total = (alone -> MOST : MOST - generation)
            :: generation == 1 && alone -> total = 1
            fi;
            unfinished = total
        };
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
        atomic {
            assert(hostile || (result == UNSETTLED && reported[generation]) ||
                   (result == (failed[generation] -> FAILED : GOOD) && bytes == total))
        };
end_unsettled:
        atomic {
            settled == generation || hostile ->
            assert(hostile || unfinished == 0);
            generation++; total = 0; i = 0
        }
    od;
    client_ended = true
}

/* A slice that no correct client sends. */
proctype forger()
{
end_quiet:
    if
    :: push(1, 0)
    :: push(1, 1)
    :: push(2, 0)
    fi
}

/* The main thread: a transfer is overdue and its peer is silent. */
proctype reporter()
{
    byte generation, old_generation;
    if
    :: generation = 1
    :: generation = 2
    fi;
    atomic {
        if
        :: word.generation == generation && word.remaining != 0 -> old_generation = record_generation
        :: else -> goto end
        fi
    };
#ifdef MUTATION_REPORT_WITHOUT_CLAIM
    atomic { record_generation = generation; record = REPORTED };
    if
    :: word.generation == generation && word.remaining != 0
    :: else -> goto end
    fi;
#else
    atomic { /* compare-and-exchange; nobody who claimed this generation or a later one is overtaken */
        if
        :: old_generation < generation && record_generation == old_generation ->
            record_generation = generation; record = REPORTING
        :: else -> goto end
        fi
    };
#endif
    reported[generation] = true;
    result = UNSETTLED;
    done = generation;
    if
    :: waiting -> asleep = false
    :: else
    fi;
#ifndef MUTATION_REPORT_WITHOUT_CLAIM
    atomic {
        if
        :: record == REPORTING -> record = REPORTED; goto end
        :: record == ENDED -> record = REPORTED /* it ended meanwhile and left the last word to us */
        fi
    };
#ifndef MUTATION_REPORT_FORGETS_SETTLED
    settled = generation;
    if
    :: waiting -> asleep = false
    :: else
    fi;
#endif
#endif
end:
    atomic { generation = 0; old_generation = 0 }
}

proctype rail(byte me)
{
    byte generation, total, was_generation, was_remaining, next, taken_bytes;
    mtype taken_fault;
    bool wake, writes_record;
end_idle:
    do
    :: rings[me]?generation, total ->
        /* collected */
#ifdef MUTATION_NO_BIAS
        atomic { word.generation = generation; word.remaining++ }; /* what was collected and is not finished */
        total = 0;
#else
        do
        :: atomic { was_generation = word.generation; was_remaining = word.remaining };
            if
            :: was_generation == generation && LIVE(was_remaining) -> break
            :: was_generation != generation && was_remaining == 0 ->
                atomic {
                    if
#ifndef MUTATION_START_WITHOUT_COMPARE
                    :: word.generation != was_generation || word.remaining != was_remaining
#endif
                    :: else ->
                        word.generation = generation; word.remaining = BIAS;
#ifdef MUTATION_BYTES_CLEARED_BY_FIRST
                        wake = true; /* borrowed: this rail was first */
#endif
                        break
                    fi
                }
            :: else -> goto violation
            fi
        od;
#endif
#ifdef MUTATION_BYTES_CLEARED_BY_FIRST
        if
        :: wake -> atomic { finished_bytes = 0; wake = false }
        :: else
        fi;
#endif
        do
        :: total == 0 -> break
        :: total != 0 ->
            atomic { was_generation = word.generation; was_remaining = word.remaining };
            if
#ifndef MUTATION_TOTAL_NOT_CHECKED
            :: was_generation != generation || was_remaining > BIAS || was_remaining < BIAS - total + 1 -> goto violation
#endif
            :: else ->
                atomic {
                    if
                    :: word.generation == was_generation && word.remaining == was_remaining ->
                        word.remaining = was_remaining - (BIAS - total);
                        total = 0
                    :: else
                    fi
                }
            fi
        od;

        /* the slice is moved: other slices are collected and finished meanwhile */
        atomic {
            if
            :: true
            :: !hostile && generation == 1 -> failed[generation] = true; fault = FAILED
            fi
        };
#ifndef MUTATION_BYTES_AFTER_COUNT
        finished_bytes++;
#endif
        do
        :: atomic { was_generation = word.generation; was_remaining = word.remaining };
            if
#ifdef MUTATION_GENERATION_NOT_CHECKED
            :: !LIVE(was_remaining) -> goto violation
#else
            :: was_generation != generation || !LIVE(was_remaining) -> goto violation
#endif
            :: else ->
                next = (was_remaining == 1 -> ENDING : was_remaining - 1);
                atomic {
                    if
#ifndef MUTATION_COUNT_WITHOUT_COMPARE
                    :: word.generation != was_generation || word.remaining != was_remaining
#endif
                    :: else ->
                        word.remaining = next;
                        assert(word.generation == generation);
                        assert(word.remaining <= BIAS || word.remaining == ENDING);
                        unfinished = (unfinished == 0 -> 0 : unfinished - 1);
                        break
                    fi
                }
            fi
        od;
#ifdef MUTATION_BYTES_AFTER_COUNT
        finished_bytes++;
#endif
        if
        :: next != ENDING -> goto next_slice
        :: else
        fi;

        /* the transfer ends */
        atomic { taken_bytes = finished_bytes; finished_bytes = 0; taken_fault = fault; fault = GOOD };
#ifdef MUTATION_REPORT_WITHOUT_CLAIM
        writes_record = !(record_generation == generation && record == REPORTED);
#endif
#ifndef MUTATION_IDLE_AFTER_DONE
        word.remaining = 0;
#endif
#ifndef MUTATION_REPORT_WITHOUT_CLAIM
        atomic {
            if
            :: record_generation != generation -> record_generation = generation; record = ENDED; writes_record = true
            :: record_generation == generation && record == REPORTING -> record = ENDED; goto next_slice
            :: record_generation == generation && record == REPORTED
            :: else -> assert(hostile)
            fi
        };
#endif
#ifdef MUTATION_DONE_BEFORE_RECORD
        atomic { settled = generation; done = generation };
#endif
        if
        :: writes_record ->
            result = (taken_fault == GOOD -> GOOD : FAILED);
            bytes = taken_bytes
        :: else
        fi;
#ifdef MUTATION_WAITING_READ_BEFORE_DONE
        wake = waiting;
#endif
#ifndef MUTATION_DONE_BEFORE_RECORD
        settled = generation; /* nothing may touch the entry after the last of these two */
        if
#ifdef MUTATION_DONE_TOLD_TWICE
        :: true -> done = generation
#else
        :: writes_record -> done = generation
        :: else
#endif
        fi;
#endif
#ifdef MUTATION_IDLE_AFTER_DONE
        word.remaining = 0;
#endif
#ifndef MUTATION_WAITING_READ_BEFORE_DONE
        wake = waiting;
#endif
        if
        :: wake -> asleep = false
        :: else
        fi;
        goto next_slice;
violation:
        assert(hostile);
next_slice:
        atomic {
            generation = 0; total = 0; was_generation = 0; was_remaining = 0; next = 0;
            taken_bytes = 0; taken_fault = 0; wake = false; writes_record = false
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
        :: alone = true
        :: run reporter()
        :: hostile = true; run forger()
        fi
    }
}
