// Deliberate protocol mistakes, compiled only into the tests that must catch them (tests/native/mutants).
// Every one of them is a rule of docs/protocols/headers.md switched off; in the library all are false.
#pragma once

namespace weft::mutants {

#if defined(WEFT_MUTANT_HEADER_FIRST)
constexpr bool kHeaderFirst = true;  // the header is stored before the payload it announces
#else
constexpr bool kHeaderFirst = false;
#endif

#if defined(WEFT_MUTANT_ONE_BUFFER)
constexpr bool kOneBuffer = true;  // both parities share one slot (R2)
#else
constexpr bool kOneBuffer = false;
#endif

#if defined(WEFT_MUTANT_SKIP_ZERO)
constexpr bool kSkipZero = true;  // a sender with nothing to send stays silent (R3)
#else
constexpr bool kSkipZero = false;
#endif

#if defined(WEFT_MUTANT_NO_SEQUENCE)
constexpr bool kNoSequence = true;  // a header is a flag: its sequence is not compared (R1)
#else
constexpr bool kNoSequence = false;
#endif

#if defined(WEFT_MUTANT_RESET)
constexpr bool kReset = true;  // a waiter sets the progress word back to zero after its wait (R6)
#else
constexpr bool kReset = false;
#endif

#if defined(WEFT_MUTANT_RELAXED_SEND)
constexpr bool kRelaxedSend = true;  // headers are stored without release (R8)
#else
constexpr bool kRelaxedSend = false;
#endif

#if defined(WEFT_MUTANT_RELAXED_WAIT)
constexpr bool kRelaxedWait = true;  // headers are loaded without acquire (R8)
#else
constexpr bool kRelaxedWait = false;
#endif

}  // namespace weft::mutants
