/* Settling and the fence between a sending and a receiving daemon, one rail. Slices 0 and 1 belong to transfer A,
 * which its owner may cancel and the decode engine may abort, even before it starts; slice 2 belongs to transfer B,
 * which must survive all that. The connection of an epoch carries frames one way and acks the other. It may break at
 * any time: then acks are lost, while frames in socket buffers may still be placed until the receiver closes its end.
 * Placing a frame takes two steps, its header is judged and later its bytes land. The control connection may break for
 * good, with messages on their way lost or not.
 *
 * No run is infinite (checked apart: no cycles), so what the monitor asserts at the end of every run is progress. */
#define SLICES 3
#define OF_A(slice) ((slice) < 2)
#define EPOCHS 3

mtype = { NEW, SENT, PLACED, REFUSED, FENCE, FENCED, ABORT, STOPPED };

chan frames[EPOCHS] = [SLICES] of { byte };
chan acks[EPOCHS] = [SLICES] of { mtype };
chan to_receiver = [3] of { mtype, byte };
chan to_sender = [2] of { mtype };
bool broken[EPOCHS], control_broken;

/* sending daemon */
byte last_epoch; /* its connection does not break */
byte epoch; /* of the newest connection */
mtype state[SLICES] = NEW;
bool stopped, settled; /* A: feeding and posting ended; reported to its owner */
bool unsettled; /* the fence has no answer */

/* receiving daemon */
bool accepted[EPOCHS], closed[EPOCHS];
byte fenced_below; /* epochs that may not be accepted any more */
bool tombstone, aborted, settled_at_decode;
byte placed_count[EPOCHS];
mtype codes[EPOCHS * SLICES];

/* the answer to a fence */
byte answer_count;
mtype answer_codes[SLICES];

byte writes[SLICES]; /* how often the bytes of a slice landed at decode */

proctype sender()
{
    byte order[SLICES], sent, acked, i;
    bool started, abort_asked, fencing;
    mtype code;
end_idle:
    do
    :: !started -> started = true
    :: started && !stopped -> stopped = true /* cancel or time-out */
    :: atomic {
            !fencing && !broken[epoch] &&
                (state[2] == NEW || (started && !stopped && (state[0] == NEW || state[1] == NEW))) ->
            if
            :: started && !stopped && state[0] == NEW -> i = 0
            :: started && !stopped && state[0] != NEW && state[1] == NEW -> i = 1
            :: state[2] == NEW -> i = 2
            fi;
            frames[epoch]!i;
            state[i] = SENT;
            order[sent] = i;
            sent++;
            i = 0
        }
    :: atomic {
            !fencing && !broken[epoch] && nempty(acks[epoch]) ->
            acks[epoch]?code;
#ifdef MUTATION_REFUSED_ACK_IS_PLACED
            code = PLACED;
#endif
            i = order[acked];
            state[i] = code;
            assert((code == PLACED) == (writes[i] == 1));
            order[acked] = 0; acked++; i = 0; code = 0
        }
    :: atomic {
            to_sender?ABORT ->
            if
            :: started -> stopped = true; abort_asked = true
            :: !started && !control_broken -> to_receiver!STOPPED, 0 /* an unknown tag: nothing of it was sent */
            :: !started && control_broken
            fi
        }
#ifdef MUTATION_NO_FENCE
    :: atomic {
            broken[epoch] ->
            do
            :: acked < sent -> state[order[acked]] = NEW; acked++
            :: else -> break
            od;
            epoch++; sent = 0; acked = 0
        }
#else
    :: atomic { !fencing && broken[epoch] && !control_broken -> fencing = true; to_receiver!FENCE, epoch }
    :: atomic { !unsettled && broken[epoch] && control_broken -> unsettled = true }
#endif
    :: atomic {
            to_sender?FENCED ->
            do
            :: acked < sent ->
                i = order[acked];
                if
#ifndef MUTATION_PLACED_SENT_AGAIN
                :: acked < answer_count ->
#ifdef MUTATION_REFUSED_AT_FENCE_IS_PLACED
                    state[i] = PLACED;
#else
                    state[i] = answer_codes[acked];
#endif
                    assert((state[i] == PLACED) == (writes[i] == 1))
#endif
                :: else -> state[i] = NEW
                fi;
                acked++
            :: else -> i = 0; break
            od;
            do /* acks of the broken connection are lost */
            :: acks[epoch]?_
            :: empty(acks[epoch]) -> break
            od;
            do
            :: i < SLICES -> answer_codes[i] = 0; codes[epoch * SLICES + i] = 0; order[i] = 0; i++
            :: else -> break
            od;
            placed_count[epoch] = 0; answer_count = 0; /* read no more */
            fencing = false; epoch++; sent = 0; acked = 0; i = 0
        }
#ifdef MUTATION_TIME_OUT_SETTLES
    :: atomic { stopped && !settled && broken[epoch] -> settled = true }
#endif
    :: atomic { stopped && !settled && state[0] != SENT && state[1] != SENT -> settled = true }
#ifdef MUTATION_ABORT_CONFIRMED_EARLY
    :: atomic { abort_asked && !control_broken -> abort_asked = false; to_receiver!STOPPED, 0 }
#else
    :: atomic { abort_asked && settled && !control_broken -> abort_asked = false; to_receiver!STOPPED, 0 }
#endif
    od
}

/* The receiver's end of one epoch's connection. */
proctype connection(byte mine)
{
    byte slice;
    mtype code;
end_not_opened:
    atomic {
        epoch >= mine ->
        if
#ifndef MUTATION_STALE_EPOCH_ACCEPTED
        :: mine < fenced_below -> closed[mine] = true
#endif
        :: else -> accepted[mine] = true
        fi
    };
end_idle:
    do
    :: closed[mine] -> break
    :: atomic {
            !closed[mine] && nempty(frames[mine]) ->
            frames[mine]?slice;
            code = PLACED;
            if
            :: OF_A(slice) && tombstone -> code = REFUSED
            :: else
            fi
        };
        if
        :: closed[mine] -> break /* part of the frame may have landed; no more will */
        :: atomic {
                !closed[mine] ->
                if
                :: code == PLACED ->
                    assert(!OF_A(slice) || (!settled && !settled_at_decode)); /* a late write */
                    assert(writes[slice] == 0);
                    writes[slice]++
                :: else
                fi;
                codes[mine * SLICES + placed_count[mine]] = code;
                placed_count[mine]++;
                acks[mine]!code;
                slice = 0; code = 0
            }
        fi
    od;
    atomic {
        slice = 0; code = 0;
        do
        :: frames[mine]?_
        :: empty(frames[mine]) -> break
        od
    }
}

inline close_below(limit)
{
    i = 0;
    do
    :: i < limit ->
        if
        :: accepted[i] -> closed[i] = true
        :: else
        fi;
        broken[i] = true;
        i++
    :: else -> break
    od;
    fenced_below = limit
}

inline answer(mine)
{
    i = 0;
    do
    :: i < SLICES -> answer_codes[i] = codes[mine * SLICES + i]; i++
    :: else -> break
    od;
    answer_count = placed_count[mine];
    if
    :: !control_broken -> to_sender!FENCED
    :: else
    fi
}

proctype receiver()
{
    byte i, fence;
end_idle:
    do
    :: atomic {
            to_receiver?FENCE, fence ->
#ifdef MUTATION_ANSWER_BEFORE_CLOSE
            answer(fence)
        };
        atomic {
            close_below(fence + 1);
#else
            close_below(fence + 1);
            answer(fence);
#endif
            i = 0; fence = 0
        }
    :: atomic { to_receiver?STOPPED, _ -> settled_at_decode = true }
    :: atomic { /* the decode engine wants its pages back */
            !aborted -> aborted = true;
#ifndef MUTATION_NO_TOMBSTONE
            tombstone = true;
#endif
#ifdef MUTATION_ABORT_SETTLES_AT_ONCE
            settled_at_decode = true;
#endif
            if
            :: !control_broken -> to_sender!ABORT
            :: else
            fi
        }
    :: atomic { /* a silent sender: this end fences by itself */
            aborted && !settled_at_decode && (control_broken || !accepted[last_epoch]) ->
#ifndef MUTATION_SILENCE_SETTLES
#ifndef MUTATION_FENCE_LOWERED
            fence = fenced_below;
#endif
            do
            :: fence < EPOCHS && accepted[fence] -> fence++
            :: else -> break
            od;
            close_below(fence);
#endif
            settled_at_decode = true;
            i = 0; fence = 0
        }
    od
}

proctype network()
{
end_idle:
    do
    :: atomic { epoch < last_epoch && !broken[epoch] -> broken[epoch] = true }
    :: atomic { !control_broken && last_epoch == 1 -> control_broken = true }
    :: atomic { control_broken && nempty(to_receiver) -> to_receiver?_, _ }
    :: atomic { control_broken && nempty(to_sender) -> to_sender?_ }
    od
}

/* Runs when nothing else can. */
proctype monitor()
{
    timeout;
    assert(unsettled || (state[2] == PLACED && writes[2] == 1)); /* B lost nothing */
    assert(unsettled || settled || (state[0] != NEW && state[0] != SENT && state[1] != NEW && state[1] != SENT));
    assert(aborted || (state[0] != REFUSED && state[1] != REFUSED));
    assert(!stopped || settled || unsettled);
    assert(!aborted || settled_at_decode)
}

init {
    atomic {
        run monitor();
        run network();
        run connection(0);
        run connection(1);
        run connection(2);
        run receiver();
        run sender();
        if /* one break and the control connection's; or two, transfer A has one slice and the control connection lasts */
        :: last_epoch = 1
        :: last_epoch = 2; state[1] = PLACED; writes[1] = 1
        fi
    }
}
