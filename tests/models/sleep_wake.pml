/* Sleep and wake (shm_layout/sleep.h) with three wakers and one sleeper. Stores wait in a first-in first-out buffer of
 * their processor until it is drained at some later time; loads look at memory. A full barrier waits until its own
 * buffer is empty, and so does an atomic read-modify-write. A processor sees its own stores early, but nobody here
 * loads what it stored itself.
 *
 * Two kinds of bed: an eventfd in epoll (rail threads; the wakers are clients and may die before any step, which the
 * daemon learns from the pidfd and then kicks the rail), or a futex on a count that is only ever incremented (threads
 * of clients; the kernel compares the count once more before it puts the thread to sleep).
 *
 * No run is infinite (checked apart: no cycles), so what the monitor asserts at the end of every run is progress. */
#define WAKERS 3
#define ITEMS (me == 0 -> 2 : 1)

/* memory */
byte work[WAKERS], count;
bool flag;
/* store buffers: a waker's holds one store at most, of its next work position */
bool pending[WAKERS];
chan flag_stores = [3] of { bool };

bool on_futex, event, asleep;
byte taken[WAKERS], published[WAKERS];

proctype processors()
{
end_idle:
    do
    :: atomic { pending[0] -> work[0]++; pending[0] = false }
    :: atomic { pending[1] -> work[1]++; pending[1] = false }
    :: atomic { pending[2] -> work[2]++; pending[2] = false }
    :: atomic { flag_stores?flag }
    od
}

proctype waker(byte me)
{
    byte i;
    bool sleeping;
    do
    :: i == ITEMS -> break
    :: else ->
#ifdef MUTATION_FLAG_READ_BEFORE_PUBLISHING
        sleeping = flag;
#endif
        if
        :: atomic { !pending[me] -> pending[me] = true; published[me]++ }
        :: !on_futex -> goto dead
        fi;
#ifndef MUTATION_NO_BARRIER_IN_WAKER
        !pending[me];
#endif
        if
#ifdef MUTATION_FLAG_READ_BEFORE_PUBLISHING
        :: true
#else
        :: sleeping = flag
#endif
        :: !on_futex -> goto dead
        fi;
        if
        :: sleeping && on_futex ->
            atomic { !pending[me] -> count++ };
            asleep = false
        :: sleeping && !on_futex ->
            if
            :: event = true
            :: goto dead
            fi
        :: else
        fi;
        atomic { i++; sleeping = false }
    od;
    goto end;
dead:
    atomic {
        !pending[me]; /* what it stored before it died gets to memory */
#ifndef MUTATION_DEATH_DOES_NOT_KICK
        event = true;
#endif
        i = 0; sleeping = false
    };
end:
    skip
}

inline look()
{
    found = false;
    i = 0;
    do
    :: i < WAKERS ->
        atomic {
            if
            :: taken[i] != work[i] -> taken[i] = work[i]; found = true
            :: else
            fi;
            i++
        }
    :: else -> i = 0; break
    od
}

proctype sleeper()
{
    byte i, seen;
    bool found;
work_on:
    look();
    if
    :: found -> goto work_on
    :: else
    fi;
#ifndef MUTATION_COUNT_READ_AFTER_LAST_LOOK
    seen = count;
#endif
#ifdef MUTATION_LOOK_BEFORE_ARMING
    look();
#endif
    flag_stores!true;
#ifndef MUTATION_NO_BARRIER_IN_SLEEPER
    empty(flag_stores);
#endif
#ifndef MUTATION_NO_LAST_LOOK
#ifndef MUTATION_LOOK_BEFORE_ARMING
    look();
#endif
#endif
#ifdef MUTATION_COUNT_READ_AFTER_LAST_LOOK
    seen = count;
#endif
    if
    :: found
    :: !found && on_futex ->
        atomic {
            if
            :: count == seen -> asleep = true
            :: else
            fi
        };
end_on_futex:
        !asleep
    :: !found && !on_futex ->
end_on_eventfd:
        atomic { event -> event = false }
    fi;
    atomic { flag_stores!false; seen = 0; found = false };
    goto work_on
}

/* Runs when nothing else can. */
proctype monitor()
{
    byte i;
    timeout;
    do
    :: i < WAKERS -> assert(taken[i] == published[i]); i++ /* nobody sleeps over work */
    :: else -> break
    od
}

init {
    atomic {
        if
        :: true
        :: on_futex = true
        fi;
        run monitor();
        run processors();
        run sleeper();
        run waker(0);
        run waker(1);
        run waker(2)
    }
}
