// Deliberate mistakes in the membership, compiled only into the simulators that must find them (docs/protocols/mutants.md).
// Each is a rule of docs/protocols/membership.md switched off; in the library all are false.
#pragma once

namespace weft::mutants {

#if defined(WEFT_MUTANT_OWN_LIST)
constexpr bool kOwnList = true;  // a rank whose record lost goes on with it
#else
constexpr bool kOwnList = false;
#endif

#if defined(WEFT_MUTANT_SAME_EPOCH)
constexpr bool kSameEpoch = true;  // an epoch whose meeting was left is tried again
#else
constexpr bool kSameEpoch = false;
#endif

#if defined(WEFT_MUTANT_SELF_STAYS)
constexpr bool kSelfStays = true;  // a rank does not look whether it is in the record
#else
constexpr bool kSelfStays = false;
#endif

#if defined(WEFT_MUTANT_TELL_NOBODY)
constexpr bool kTellNobody = true;  // who was left out is not told
#else
constexpr bool kTellNobody = false;
#endif

#if defined(WEFT_MUTANT_MEET_HALF)
constexpr bool kMeetHalf = true;  // memory is renewed before all members have come
#else
constexpr bool kMeetHalf = false;
#endif

#if defined(WEFT_MUTANT_WAIT_FOR_DEAD)
constexpr bool kWaitForDead = true;  // a meeting goes on though a member is gone
#else
constexpr bool kWaitForDead = false;
#endif

#if defined(WEFT_MUTANT_STAY_BEHIND)
constexpr bool kStayBehind = true;  // a meeting goes on though the next epoch is decided
#else
constexpr bool kStayBehind = false;
#endif

#if defined(WEFT_MUTANT_LOST_IS_SAFE)
constexpr bool kLostIsSafe = true;  // who was merely lost counts as proven gone
#else
constexpr bool kLostIsSafe = false;
#endif

#if defined(WEFT_MUTANT_HEAR_STRANGERS)
constexpr bool kHearStrangers = true;  // neither group nor incarnation nor membership of the sender is asked
#else
constexpr bool kHearStrangers = false;
#endif

#if defined(WEFT_MUTANT_HEAR_ALL_ERAS)
constexpr bool kHearAllEras = true;  // what is said of an earlier era counts
#else
constexpr bool kHearAllEras = false;
#endif

#if defined(WEFT_MUTANT_NEW_DRAFT)
constexpr bool kNewDraft = true;  // a record is changed while a compare-and-set that names it is on its way
#else
constexpr bool kNewDraft = false;
#endif

#if defined(WEFT_MUTANT_NO_ACK)
constexpr bool kNoAck = true;  // a change is decided before all have acknowledged it
#else
constexpr bool kNoAck = false;
#endif

#if defined(WEFT_MUTANT_STALE_ACK)
constexpr bool kStaleAck = true;  // a boundary that is past is acknowledged
#else
constexpr bool kStaleAck = false;
#endif

#if defined(WEFT_MUTANT_NO_WAIT)
constexpr bool kNoWait = true;  // a boundary is passed though a change that was acknowledged for it is not decided
#else
constexpr bool kNoWait = false;
#endif

#if defined(WEFT_MUTANT_UNPREPARED)
constexpr bool kUnprepared = true;  // a change is acknowledged before its joiners can be taken in
#else
constexpr bool kUnprepared = false;
#endif

}  // namespace weft::mutants
