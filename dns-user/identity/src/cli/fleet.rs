//! `token`.

use std::{
    path::PathBuf,
    process::ExitCode,
    time::{Duration, SystemTime},
};

use crate::fleet::state::StateFolder;

#[derive(Debug, clap::Args)]
pub(super) struct Token {
    /// State folder of the issuer
    #[arg(long, value_name = "FOLDER")]
    state: PathBuf,
    /// Id of the instance, as in records.json
    #[arg(long, value_name = "ID")]
    instance: String,
    /// Minutes for which the token is valid
    #[arg(long, value_name = "MINUTES", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=10080))]
    minutes: u64,
}

impl Token {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let Self { state, instance, minutes } = self;
        let lifetime = Duration::from_secs(minutes * 60);
        let token = StateFolder::open(state)?.create_token(&instance, SystemTime::now(), lifetime)?;
        println!("{}", token.as_str());
        Ok(ExitCode::SUCCESS)
    }
}
